# How does the loss depend on the number of replicas, if the tokens of a step and the bytes of a
# rank stay the same? With M replicas a rank sends 2 (M-1)/M times the model in a sync, so tau grows
# from 16 to 30: the bytes after the warm-up are then equal within 4%. The outer step is the best of
# three for each M, found on seed 7. There a lower learning rate helps none of them by 1%.
set -e
run="--plain --jobs 3 --device cpu --n_layer 4 --n_embd 64 --n_head 2 --max_steps 448"
run="$run --eval_interval 448"
edit="--method edit --sync_warmup_steps 32 $run"
python -m lab.sweep replicas --replicas,batch_size,tau 2,8,16 4,4,24 8,2,28 16,1,30 --lr 0.0045 \
    --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 --best 7 --seed 1 2 3 $edit
python -m lab.sweep replicas_tune --replicas,batch_size,tau 2,8,16 4,4,24 --lr 0.003 --seed 7 \
    --outer_lr 0.7 --outer_momentum 0.5 $edit
python -m lab.sweep replicas_tune --replicas,batch_size,tau 8,2,28 16,1,30 --lr 0.003 --seed 7 \
    --outer_lr 0.9 --outer_momentum 0.3 $edit
python -m lab.table out/sweep/replicas_tune/*/ --out lab/results/replicas_tune
python -m lab.sweep replicas --method minibatch --replicas 4 --batch_size 4 --lr 0.0045 \
    --seed 1 2 3 $run
python -m lab.table out/sweep/replicas/*/ --base method=minibatch --out lab/results/replicas
python -m lab.table out/sweep/replicas/*/ --only method=edit --base replicas=2 --x replicas \
    --show local_bytes --out lab/results/replicas_edit
