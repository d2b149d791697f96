# Which outer step is the best one, for each tau? Six pairs of learning rate and momentum; with
# AdamW inside, EDiT has seven more. One seed, which no other experiment has. 448 steps.
set -e
run="--lr 0.0045 --batch_size 4 --sync_warmup_steps 32 --max_steps 448 --eval_interval 448"
run="$run --device cpu --seed 7"
for inner in "adamw" "muon --muon_lr 0.01"; do
    for pair in 1:0 0.9:0.3 0.7:0.5 0.26:0.8 0.5:0.8 0.7:0.8; do
        all="--method diloco edit streaming_edit one_bit_edit --warmup_format int8"
        all="$all --optimizer $inner --outer_lr ${pair%:*} --outer_momentum ${pair#*:} $run"
        python -m lab.sweep outer_steps --tau 4 --fragments 2 --delay 1 $all
        python -m lab.sweep outer_steps --tau 16 64 $all
    done
done
edit="--method edit --tau 4 16 64 $run"
python -m lab.sweep outer_steps --outer_lr 0.26 0.5 --outer_momentum 0 0.5 $edit
python -m lab.sweep outer_steps --outer_lr 0.7 --outer_momentum 0 $edit
python -m lab.sweep outer_steps --outer_lr 1 --outer_momentum 0.5 0.8 $edit
python -m lab.table out/sweep/outer_steps/*/ --out lab/results/outer_steps
python -m lab.gain lab/results/outer_steps.csv --only method=edit optimizer=adamw \
    --out lab/results/gain
