# Does the price of rounds shrink with the model or with the length of the training? `size`: small
# models see as many tokens for each parameter as the one of 0.9 million in 2,000 steps, and have
# their own best learning rate. `length`: that one in fewer steps and in more; its averaged gradients
# of fewer steps are those of worth.sh. Each line has its own best outer step. `wsd`: the lengths once
# more, as decays of one run for each seed, so with one outer step, the default.
set -e
run="--plain --jobs 2 --replicas 4 --device cpu --dtype bf16 --batch_size 4 --eval_interval 100000"
run="$run --seed 5 6 8 9 --best 7"
edit="--method edit --tau 16"
pairs="--outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.5,0.5"
small="--n_embd 40 --n_head 2 --max_steps 233 $run"
middle="--n_embd 72 --n_head 2 --max_steps 623 $run"
python -m lab.sweep size --method minibatch --lr 0.00225 0.0045 0.009 $small
python -m lab.sweep size --lr 0.00225 0.0045 0.009 0.018 --sync_warmup_steps 4 \
    $edit $pairs $small
python -m lab.sweep size --method minibatch --lr 0.001125 0.00225 0.0045 0.009 $middle
python -m lab.sweep size --lr 0.001125 0.00225 0.0045 0.009 --sync_warmup_steps 10 \
    $edit $pairs $middle
python -m lab.sweep length --max_steps 500 1000 4000 --lr 0.0045 --sync_warmup_steps 32 $edit $run \
    --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.5,0.8
python -m lab.sweep length --method minibatch --max_steps 4000 --lr 0.0045 ${run% --best 7}
wsd="--schedule wsd --method minibatch edit --tau 16 --sync_warmup_steps 32 --lr 0.0045"
wsd="${run% --best 7} $wsd --outer_lr 0.7 --outer_momentum 0.5"
python -m lab.sweep wsd $wsd --max_steps 500 1000 2000
python -m lab.sweep wsd $wsd --max_steps 4000 --seed 5 6 8
python -m lab.table out/sweep/size/*/ --out lab/results/size
python -m lab.table out/sweep/size_tune/*/ --out lab/results/size_tune
python -m lab.table out/sweep/length/*/ --show cosine --out lab/results/length
python -m lab.table out/sweep/wsd/*/ --base method=minibatch --out lab/results/wsd
python -m lab.table out/sweep/length_tune/*/ --show cosine --out lab/results/length_tune
