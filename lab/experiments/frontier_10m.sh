# What do 1 and 2 bits lose with 10 million parameters? With Muon, on a GPU that the ranks share.
# One run was cut off, and made on CPUs.
set -e
run="--model 10m --batch_size 2 --max_steps 1000 --eval_interval 1000"
gpu="--optimizer muon --muon_lr 0.01 --device cuda --backend shm $run"
one="--method one_bit_edit --tau 16 --warmup_format int8"
two="--quantize two_bits --outer_lr 0.5 --outer_momentum 0.8 --sync_warmup_steps 16"
python -m lab.sweep frontier_10m --method minibatch --lr 0.0005 --device cpu --seed 5 6 8 $run
python -m lab.sweep frontier_10m --method minibatch --seed 5 6 $gpu
python -m lab.sweep frontier_10m $one --outer_lr 0.9 --outer_momentum 0.3 --sync_warmup_steps 2 \
    --seed 5 6 8 $gpu
python -m lab.sweep frontier_10m $one $two --seed 5 6 $gpu
python -m lab.sweep frontier_10m $one $two --optimizer muon --muon_lr 0.01 --device cpu --seed 8 \
    $run
python -m lab.table out/sweep/frontier_10m/*/ --base method=minibatch --out lab/results/frontier_10m
