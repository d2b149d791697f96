# How sick must a replica be for the penalty to help? Replica 3 trains one round with 3, 10, 30 or
# 100 times its learning rate. The outer step is that of tau.sh.
set -e
run="--plain --jobs 2 --replicas 4 --device cpu --dtype bf16 --batch_size 4 --lr 0.0045 --tau 16"
run="$run --sync_warmup_steps 32 --max_steps 448 --eval_interval 16 --eval_batches 8 --seed 1 2 3"
sick="3:241:256:3 3:241:256:10 3:241:256:30 3:241:256:100"
edit="--method edit --outer_lr 0.9 --outer_momentum 0.3"
diloco="--method diloco --outer_lr 1 --outer_momentum 0"
python -m lab.sweep dose --scale_lr "" $sick $edit $run
python -m lab.sweep dose --scale_lr "" $sick $diloco $run
healthy="--base scale_lr=none"
python -m lab.table out/sweep/dose/*/ $healthy --out lab/results/dose
python -m lab.table out/sweep/dose/*/ $healthy --at 272 --out lab/results/dose_272

# What do EDiT's parts do alone (elimination, weights, clip)? And a rule of one line, which leaves
# out a replica whose loss is twice the median?
python -m lab.sweep dose_parts --no-weighted_averaging --no-pseudo_grad_clipping \
    --scale_lr "" $sick $edit $run
python -m lab.sweep dose_parts --no-anomaly_elimination --no-pseudo_grad_clipping \
    --scale_lr "" $sick $edit $run
python -m lab.sweep dose_parts --no-anomaly_elimination --no-weighted_averaging \
    --scale_lr "" $sick $edit $run
python -m lab.table out/sweep/dose_parts/*/ $healthy --out lab/results/dose_parts
python -m lab.table out/sweep/dose_parts/*/ $healthy --at 272 --out lab/results/dose_parts_272
rule="--replicas 4 --device cpu --dtype bf16 --batch_size 4 --lr 0.0045 --tau 16 --outer_lr 1"
rule="$rule --outer_momentum 0 --sync_warmup_steps 32 --max_steps 448 --eval_interval 16"
for seed in 1 2 3; do
    for factor in 1 3 10 30 100; do
        python -m lab.loss_rule $rule --eval_batches 8 --scale_lr 3:241:256:$factor --seed $seed \
            --out_dir out/sweep/loss_rule/$factor-$seed --overwrite
    done
done
healthy="--base scale_lr=3:241:256:1"
python -m lab.table out/sweep/loss_rule/*/ $healthy --out lab/results/loss_rule
python -m lab.table out/sweep/loss_rule/*/ $healthy --at 272 --out lab/results/loss_rule_272
python -m lab.table lab/results/dose.csv lab/results/dose_parts.csv lab/results/loss_rule.csv \
    --x scale_lr --out lab/results/dose_of_all
