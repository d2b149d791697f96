# Must all replicas draw from the same data? With --data_by_replica each has a quarter of the
# documents for itself, in the order of their folders. A small model in one process. Each method has
# the best of three outer steps for each kind of data, found on seed 7. (The kept runs have the best
# one for both kinds together.)
set -e
run="--plain --jobs 2 --device cpu --n_layer 4 --n_embd 64 --n_head 2 --batch_size 4 --replicas 4"
run="$run --max_steps 448 --lr 0.0045 --eval_interval 448 --tau 16 --sync_warmup_steps 32"
python -m lab.sweep own_data --method diloco edit streaming_edit robust --data_by_replica no yes \
    --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 --best 7 --seed 1 2 3 $run
python -m lab.table out/sweep/own_data_tune/*/ --out lab/results/own_data_tune
python -m lab.table out/sweep/own_data/*/ --base method=diloco --x data_by_replica \
    --out lab/results/own_data
