# What do other methods reach in the run of `make train` (2 replicas x 2 shards)? And 4 replicas?
set -e
run="--method minibatch diloco edit --device cpu --eval_interval 200 --seed 1 2 3"
python -m lab.sweep first $run --shards 2
python -m lab.sweep first --method streaming_edit --device cpu --shards 2 --seed 1 2 3
python -m lab.table out/sweep/first/*/ --base method=minibatch --show local_bytes \
    --out lab/results/first
python -m lab.table lab/results/first.csv --base method=diloco
python -m lab.sweep first_4 $run --lr 0.0045
python -m lab.table out/sweep/first_4/*/ --base method=minibatch --out lab/results/first_4
