# What does EDiT's penalty do when a replica is sick? Replica 3 trains with 100 or 3 times its
# learning rate, or on random tokens, or sends its progress with the wrong sign. The outer step is
# that of tau.sh.
set -e
run="--tau 16 --batch_size 4 --sync_warmup_steps 32 --eval_interval 16 --device cpu --seed 1 2 3"
diloco="--method diloco --lr 0.0045 --outer_lr 1 --outer_momentum 0 $run"
edit="--method edit --lr 0.0045 --outer_lr 0.9 --outer_momentum 0.3 $run"
robust="--method robust --lr 0.003 --outer_lr 0.7 --outer_momentum 0.8 $run"
short="--max_steps 272 --eval_batches 8"
for method in "$diloco" "$edit"; do
    python -m lab.sweep penalty --scale_lr "" 3:241:256:100 3:209:256:3 $short $method
    python -m lab.sweep penalty --random_tokens 3:209:256 $short $method
done
parts="--scale_lr 3:241:256:100 $short $edit"
python -m lab.sweep penalty --no-weighted_averaging --no-pseudo_grad_clipping $parts
python -m lab.sweep penalty --no-anomaly_elimination --no-pseudo_grad_clipping $parts
python -m lab.sweep penalty --no-anomaly_elimination --no-weighted_averaging $parts
for method in "$diloco" "$edit" "$robust"; do
    python -m lab.sweep penalty --flip "" 3:289:448 --max_steps 448 $method
done
healthy="--base scale_lr=none random_tokens=none flip=none"
python -m lab.table out/sweep/penalty/*/ $healthy --out lab/results/penalty
python -m lab.table out/sweep/penalty/*/ --only method=edit max_steps=272 $healthy \
    anomaly_elimination=yes weighted_averaging=yes pseudo_grad_clipping=yes
python -m lab.table out/sweep/penalty/*/ --only max_steps=448 --base flip=none
