# Which tau and which outer step fit a model and a text of your own? The words behind the name of
# this file go to all runs:
#     sh lab/experiments/tune.sh --data my_corpus --model 10m --seed 7
#     sh lab/experiments/tune.sh --data my_corpus --max_steps 2000 --sync_warmup_steps 32 --plain
# These are 48 runs.
# So: take the lowest loss of each tau, and compare methods on other seeds (or let lab.sweep --best
# do both). EDiT's best outer step fits DiLoCo, too. A short tau wants little momentum: the picture
# shows the loss over the gain of the outer step.
set -e
python -m lab.sweep tune --method edit --tau 4 16 64 --outer_lr 0.5 0.7 0.9 1 \
    --outer_momentum 0 0.3 0.5 0.8 "$@"
python -m lab.table out/sweep/tune/*/ --x gain --out out/sweep/tune/gain
