# What do rounds cost in the run of `make train` (2 replicas x 2 shards)?
set -e
python -m lab.sweep first --method minibatch diloco edit streaming_edit --shards 2 --seed 1 2 3 \
    --device cpu --dtype bf16 --plain --jobs 2
python -m lab.table out/sweep/first/*/ --base method=minibatch --show local_bytes \
    --out lab/results/first
python -m lab.table lab/results/first.csv --base method=diloco
