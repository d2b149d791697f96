# By how much may an outer step multiply the moves of rounds? Eight outer steps for each tau, on three
# seeds. --plain records how much successive rounds move alike.
# Then, on other seeds, three of them and the paper's in the run of `make train`, and the default with
# wsd.
set -e
run="--plain --jobs 2 --method edit --device cpu --dtype bf16"
short="--replicas 4 --batch_size 4 --lr 0.0045 --sync_warmup_steps 32 --max_steps 448"
python -m lab.sweep gain --tau 4 16 64 --seed 7 10 11 --eval_interval 100000 $short $run \
    --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.5,0.8 0.7,0.8 0.5,0 0.5,0.5 1,0.5
python -m lab.table out/sweep/gain/*/ --show cosine --x gain --out lab/results/gain
python -m lab.sweep default --shards 2 --seed 1 2 3 $run \
    --outer_lr,outer_momentum 0.7,0.5 0.9,0.3 0.7,0.8 0.8,0.85
python -m lab.sweep default --shards 2 --schedule wsd --outer_lr 0.7 --outer_momentum 0.5 \
    --seed 1 2 3 $run
python -m lab.table out/sweep/default/*/ --base outer_lr=0.7 outer_momentum=0.5 \
    schedule=cosine --show cosine --out lab/results/default
