# How does the loss depend on the number of replicas, if the tokens of a step and the bytes of a
# rank stay the same? With M replicas a rank sends 2 (M-1)/M times the model in a sync, so tau grows
# from 16 to 30: the bytes after the warm-up are then equal within 4%. The outer step is the best of
# three for each M, found on seed 7. There a lower learning rate helps none of them by 1%.
set -e
run="--plain --jobs 3 --device cpu --n_layer 4 --n_embd 64 --n_head 2 --max_steps 448"
run="$run --eval_interval 448"
edit="--method edit --sync_warmup_steps 32 $run"
m2="--replicas 2 --batch_size 8 --tau 16 $edit"
m4="--replicas 4 --batch_size 4 --tau 24 $edit"
m8="--replicas 8 --batch_size 2 --tau 28 $edit"
m16="--replicas 16 --batch_size 1 --tau 30 $edit"
small="--outer_lr 0.9 --outer_momentum 0.3"
large="--outer_lr 0.7 --outer_momentum 0.5"
for size in "$m2" "$m4" "$m8" "$m16"; do
    for step in "--outer_lr 1 --outer_momentum 0" "$small" "$large"; do
        python -m lab.sweep replicas_tune --lr 0.0045 $step --seed 7 $size
    done
done
python -m lab.sweep replicas_tune --lr 0.003 $large --seed 7 $m2
python -m lab.sweep replicas_tune --lr 0.003 $large --seed 7 $m4
python -m lab.sweep replicas_tune --lr 0.003 $small --seed 7 $m8
python -m lab.sweep replicas_tune --lr 0.003 $small --seed 7 $m16
python -m lab.table out/sweep/replicas_tune/*/ --out lab/results/replicas_tune
python -m lab.sweep replicas --lr 0.0045 $large --seed 1 2 3 $m2
python -m lab.sweep replicas --lr 0.0045 $large --seed 1 2 3 $m4
python -m lab.sweep replicas --lr 0.0045 $small --seed 1 2 3 $m8
python -m lab.sweep replicas --lr 0.0045 $small --seed 1 2 3 $m16
python -m lab.sweep replicas --method minibatch --replicas 4 --batch_size 4 --lr 0.0045 \
    --seed 1 2 3 $run
python -m lab.table out/sweep/replicas/*/ --base method=minibatch --out lab/results/replicas
python -m lab.table out/sweep/replicas/*/ --only method=edit --base replicas=2 --x replicas \
    --show local_bytes --out lab/results/replicas_edit
