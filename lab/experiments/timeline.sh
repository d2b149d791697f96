# When does each replica compute, and when does it wait? Replica 1 takes twice as long for a step.
# Run it on an idle machine.
set -e
run="--ranks 2 --dtype fp32 --device cpu --lr 0.0045 --timeline --seed 7"
run="$run --eval_interval 1000000 --log_interval 8"
slow="--link_mbps 60 --slow_replica 1:2 --batch_size 16 $run"
rounds="--tau 8 --sync_warmup_steps 0 --max_steps 40 $slow"
python -m lab.sweep timeline --method minibatch --max_steps 16 $slow
python -m lab.sweep timeline --method diloco edit --outer_lr 0.7 --outer_momentum 0.8 $rounds
python -m lab.sweep timeline --method co2 --outer_lr 0.7 --outer_momentum 0.2 $rounds
python -m lab.sweep timeline --method streaming_diloco --outer_lr 0.9 --outer_momentum 0.7 $rounds
python -m lab.sweep timeline --method a_edit --tau_time_s 2.6 --sync_warmup_steps 0 \
    --outer_lr 0.7 --outer_momentum 0.8 --max_steps 60 $slow
python -m lab.timeline out/sweep/timeline/*/ --out lab/results/timeline
