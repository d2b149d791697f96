# How long does a step take over a slow link? Run it on an idle machine.
set -e
run="--link_mbps 10 100 --batch_size 4 --lr 0.0045 --eval_interval 1000000 --device cpu --seed 7"
rounds="--tau 64 --sync_warmup_steps 0 --max_steps 192 --log_interval 64 $run"
python -m lab.sweep link --method minibatch --max_steps 12 --log_interval 4 $run
python -m lab.sweep link --method post_local_sgd slowmo co2 noloco $rounds
python -m lab.sweep link --method diloco edit --outer_lr 0.7 --outer_momentum 0.8 $rounds
python -m lab.sweep link --method streaming_diloco streaming_edit \
    --outer_lr 0.9 --outer_momentum 0.7 $rounds
python -m lab.table out/sweep/link/*/ --show step_ms --out lab/results/link
