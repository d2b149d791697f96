# Must all replicas draw from the same data? With --data_by_replica each has a quarter of the
# documents for itself, in the order of their folders. A small model in one process. Each method has
# the outer step that is the best of three for both kinds of data together, found on seed 7.
set -e
run="--plain --jobs 2 --device cpu --n_layer 4 --n_embd 64 --n_head 2 --batch_size 4 --replicas 4"
run="$run --max_steps 448 --lr 0.0045 --eval_interval 448 --data_by_replica no yes"
local="--tau 16 --sync_warmup_steps 32 $run"
for pair in 1:0 0.9:0.3 0.7:0.5; do
    python -m lab.sweep own_data_tune --method diloco edit streaming_edit robust --seed 7 \
        --outer_lr ${pair%:*} --outer_momentum ${pair#*:} $local
done
python -m lab.table out/sweep/own_data_tune/*/ --out lab/results/own_data_tune
python -m lab.sweep own_data --method diloco edit robust --outer_lr 0.7 --outer_momentum 0.5 \
    --seed 1 2 3 $local
python -m lab.sweep own_data --method streaming_edit --outer_lr 0.9 --outer_momentum 0.3 \
    --seed 1 2 3 $local
python -m lab.table out/sweep/own_data/*/ --base method=diloco --x data_by_replica \
    --out lab/results/own_data
