# What does a sync cost in the constant phase of a schedule, and what in its decay? For each
# schedule the learning rate of averaged gradients is the best of three, found on seed 7, as is the
# outer step of each tau.
set -e
run="--plain --jobs 2 --device cpu --n_layer 4 --n_embd 64 --n_head 2 --batch_size 4 --replicas 4"
run="$run --max_steps 448 --schedule cosine wsd --eval_interval 32 --best 7 --seed 1 2 3"
python -m lab.sweep schedule --method minibatch --lr 0.003 0.0045 0.009 $run
python -m lab.sweep schedule --method edit --tau 16 64 --sync_warmup_steps 32 --lr 0.0045 \
    --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 $run
python -m lab.table out/sweep/schedule_tune/*/ --out lab/results/schedule_tune
python -m lab.table out/sweep/schedule/*/ --base method=minibatch --out lab/results/schedule
python -m lab.table lab/results/schedule.csv --base schedule=cosine
python -m lab.table out/sweep/schedule/*/ --base method=minibatch --at 352 \
    --out lab/results/schedule_352
