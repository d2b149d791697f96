# Which outer step is the best one, for each tau? Six pairs of learning rate and momentum; with
# AdamW inside, EDiT has seven more. One seed, which no other experiment reports. 448 steps.
set -e
run="--lr 0.0045 --batch_size 4 --sync_warmup_steps 32 --max_steps 448 --eval_interval 448"
run="$run --device cpu --seed 7"
pairs="--outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.26,0.8 0.5,0.8 0.7,0.8"
for inner in "adamw" "muon --muon_lr 0.01"; do
    all="--method diloco edit streaming_edit one_bit_edit --warmup_format int8"
    all="$all --optimizer $inner $pairs $run"
    python -m lab.sweep outer_steps --tau 4 --fragments 2 --delay 1 $all
    python -m lab.sweep outer_steps --tau 16 64 $all
done
python -m lab.sweep outer_steps --method edit --tau 4 16 64 $run \
    --outer_lr,outer_momentum 0.26,0 0.5,0 0.7,0 0.26,0.5 0.5,0.5 1,0.5 1,0.8
python -m lab.table out/sweep/outer_steps/*/ --out lab/results/outer_steps
