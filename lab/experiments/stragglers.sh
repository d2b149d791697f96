# What does one slow replica cost, by the virtual clock (a step takes 1 s) and by the real one?
# EDiT has the outer step of tau.sh, which A-EDiT takes over.
set -e
run="--batch_size 4 --max_steps 448 --sync_warmup_steps 32 --lr 0.0045 --outer_lr 0.9"
run="$run --outer_momentum 0.3 --eval_interval 448 --log_interval 64 --device cpu --seed 1 2 3"
virtual="--slow_replica 3:2.0 3:4.0 --virtual_clock"
python -m lab.sweep stragglers --method edit --tau 16 $virtual $run
python -m lab.sweep stragglers --method a_edit --tau_time_s 16 \
    --step_weighting none norm_per_step $virtual $run
python -m lab.sweep stragglers --method edit --tau 16 --slow_replica 3:2.0 $run
python -m lab.sweep stragglers --method a_edit --tau_time_s 1 --slow_replica 3:2.0 $run
python -m lab.table out/sweep/stragglers/*/ --base method=edit --show tokens_per_s --x train_s \
    --out lab/results/stragglers
