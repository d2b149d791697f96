# What does a sync cost in the constant phase of a schedule, and what in its decay? The learning rate
# is the best of three for averaged gradients, found on seed 7, as is the outer step of each tau.
set -e
run="--plain --jobs 2 --device cpu --n_layer 4 --n_embd 64 --n_head 2 --batch_size 4 --replicas 4"
run="$run --max_steps 448 --schedule cosine wsd"
local="--method edit --sync_warmup_steps 32 --lr 0.0045 $run"
python -m lab.sweep schedule_tune --method minibatch --lr 0.003 0.0045 0.009 --eval_interval 448 \
    --seed 7 $run
for pair in 1:0 0.9:0.3 0.7:0.5; do
    python -m lab.sweep schedule_tune --tau 16 64 --outer_lr ${pair%:*} --outer_momentum ${pair#*:} \
        --eval_interval 448 --seed 7 $local
done
python -m lab.table out/sweep/schedule_tune/*/ --out lab/results/schedule_tune
run="$run --eval_interval 32 --seed 1 2 3"
local="$local --eval_interval 32 --seed 1 2 3"
python -m lab.sweep schedule --method minibatch --lr 0.0045 $run
python -m lab.sweep schedule --tau 16 --outer_lr 0.7 --outer_momentum 0.5 $local
python -m lab.sweep schedule --tau 64 --outer_lr 0.9 --outer_momentum 0.3 $local
python -m lab.table out/sweep/schedule/*/ --base method=minibatch --x step --first 192 \
    --out lab/results/schedule
python -m lab.table out/sweep/schedule/*/ --base method=minibatch --at 352 \
    --out lab/results/schedule_352
