# By how much may an outer step multiply the moves of rounds? Eight outer steps for each tau, one
# seed, which no other experiment reports. --plain records how much successive rounds move alike.
set -e
run="--plain --jobs 2 --replicas 4 --device cpu --dtype bf16 --batch_size 4 --lr 0.0045 --seed 7"
run="$run --sync_warmup_steps 32 --max_steps 448 --eval_interval 100000"
python -m lab.sweep gain --method edit --tau 4 16 64 $run --outer_lr,outer_momentum 1,0 0.9,0.3 \
    0.7,0.5 0.5,0.8 0.7,0.8 0.5,0 0.5,0.5 1,0.5
python -m lab.table out/sweep/gain/*/ --show cosine --x gain --out lab/results/gain
