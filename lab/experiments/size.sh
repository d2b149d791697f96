# Does the price of rounds shrink with the model or with the length of the training? All sizes see
# equally many tokens for each parameter, and each size has its own best learning rate. Each has its
# own best outer step. With 0.9 million parameters averaged gradients are those of worth.sh.
set -e
run="--plain --jobs 2 --replicas 4 --device cpu --dtype bf16 --batch_size 4 --eval_interval 100000"
run="$run --seed 5 6 8 9 --best 7"
pairs="--outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.5,0.8"
small="--n_embd 40 --n_head 2 --max_steps 233 --lr_warmup_steps 6 --lr 0.0045 0.009 0.018 $run"
middle="--n_embd 72 --n_head 2 --max_steps 623 --lr_warmup_steps 16 --lr 0.0045 0.009 0.018 $run"
python -m lab.sweep size --method minibatch $small
python -m lab.sweep size --method edit --tau 16 --sync_warmup_steps 4 $pairs $small
python -m lab.sweep size --method minibatch $middle
python -m lab.sweep size --method edit --tau 16 --sync_warmup_steps 10 $pairs $middle
for name in size size_tune; do
    python -m lab.table out/sweep/$name/*/ --base method=minibatch --out lab/results/$name
done
for steps in 500 1000; do
    python -m lab.sweep length --method edit --tau 16 --sync_warmup_steps 32 --max_steps $steps \
        --lr 0.0045 $pairs $run
done
for name in length length_tune; do
    python -m lab.table out/sweep/$name/*/ --out lab/results/$name
done
python -m lab.table lab/results/length.csv lab/results/worth.csv --base method=minibatch
