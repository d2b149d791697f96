# Which learning rate is the best one for averaged gradients in 2,000 steps?
set -e
run="--method minibatch --batch_size 4 --max_steps 2000 --eval_interval 2000 --device cpu --seed 7"
python -m lab.sweep inner_steps --lr 0.002 0.003 0.0045 0.006 0.0075 0.009 $run
python -m lab.sweep inner_steps --optimizer muon --lr 0.0045 --muon_lr 0.01 0.02 0.03 0.04 $run
python -m lab.sweep inner_steps --optimizer muon --lr 0.003 0.0075 --muon_lr 0.02 $run
python -m lab.sweep inner_steps --optimizer muon --lr 0.0045 --muon_lr 0.005 0.007 $run \
    --plain --jobs 2 --replicas 4 --dtype bf16
python -m lab.table out/sweep/inner_steps/*/ --out lab/results/inner_steps
