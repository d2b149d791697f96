# 0/1 Adam that synchronizes after every step, in 448 steps of which 128 are the warm-up.
set -e
run="--batch_size 4 --max_steps 448 --eval_interval 64 --device cpu --seed 1 2 3"
python -m lab.sweep zero_one_adam --method minibatch --lr 0.0045 $run
python -m lab.sweep zero_one_adam --method zero_one_adam --lr 0.003 --tau 1 \
    --sync_warmup_steps 128 $run
python -m lab.table out/sweep/zero_one_adam/*/ --base method=minibatch \
    --out lab/results/zero_one_adam
