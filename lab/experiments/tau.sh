# How long may a round be? Each method has the best outer step of its tau, found on another seed
# (outer_steps.sh). Runs of 448 steps, 32 of them warm-up; 4 replicas.
set -e
run="--batch_size 4 --max_steps 448 --sync_warmup_steps 32 --lr 0.0045 --eval_interval 448"
run="$run --device cpu --seed 1 2 3"
python -m lab.sweep tau --method minibatch diloco edit --tau 4 \
    --outer_lr 1 --outer_momentum 0 $run
python -m lab.sweep tau --method diloco --tau 16 64 --outer_lr 1 --outer_momentum 0 $run
python -m lab.sweep tau --method edit --tau 16 64 --outer_lr 0.9 --outer_momentum 0.3 $run
python -m lab.table out/sweep/tau/*/ --base method=minibatch --show local_bytes \
    --out lab/results/tau
