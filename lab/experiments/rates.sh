# Does the penalty let replicas train with higher rates? The best rate of averaged gradients, and
# two, four and eight times as much; no replica is disturbed. DiLoCo with EDiT's outer step is EDiT
# without its penalty.
set -e
python -m lab.sweep rates --plain --jobs 2 --method diloco edit --lr 0.0045 0.009 0.018 0.036 \
    --tau 16 --sync_warmup_steps 32 --outer_lr 0.9 --outer_momentum 0.3 --max_steps 448 \
    --replicas 4 --device cpu --dtype bf16 --batch_size 4 --eval_interval 100000 --seed 1 2 3
python -m lab.table out/sweep/rates/*/ --base method=diloco --out lab/results/rates
