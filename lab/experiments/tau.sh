# How long may a round be? Each method has the best outer step of its tau, found on seed 7. Runs of
# 448 steps, 32 of them warm-up; 4 replicas.
set -e
run="--batch_size 4 --max_steps 448 --sync_warmup_steps 32 --lr 0.0045 --eval_interval 448"
python -m lab.sweep tau --method minibatch diloco edit --tau 4 16 64 --best 7 --seed 1 2 3 \
    --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.26,0.8 0.5,0.8 0.7,0.8 --device cpu $run
python -m lab.table out/sweep/tau/*/ --base method=minibatch --show local_bytes \
    --out lab/results/tau
