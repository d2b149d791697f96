# Is linking four machines better than the best of them alone? The loss of one machine alone at
# several lengths (with the rate that is best in 2,000 steps, and in 1,000), and with a quarter of the
# batch; what frontier.sh lacks: rounds of 64 steps (with
# the best outer step of outer_steps_2000.sh), and the same bytes as larger batches. Then, on an idle
# machine, the time of a step, and runs over a simulated link that check the calculation.
set -e
run="--plain --jobs 2 --replicas 4 --device cpu --dtype bf16 --lr 0.0045 --eval_interval 100000"
run="$run --seed 5 6 8 9"
python -m lab.sweep worth --method minibatch --batch_size 4 --max_steps 250 500 1000 1500 $run
python -m lab.sweep worth_rates --method minibatch --batch_size 4 --max_steps 1000 $run --seed 7 \
    --lr 0.003 0.0045 0.006 0.009
python -m lab.sweep worth --method edit --tau 64 --outer_lr 0.7 --outer_momentum 0.5 \
    --sync_warmup_steps 32 --batch_size 4 --max_steps 2000 $run
python -m lab.sweep worth_batch --method minibatch --batch_size 64 --max_steps 125 \
    --lr_warmup_steps 12 $run --lr 0.001 0.0014 0.002 0.003 0.0045 0.009 --best 7
python -m lab.sweep worth_muon --method minibatch --optimizer muon --muon_lr 0.01 --batch_size 4 \
    --max_steps 1000 1500 $run
small="--plain --jobs 2 --replicas 1 --device cpu --dtype bf16 --batch_size 4 --max_steps 8000"
small="$small --method minibatch --lr_warmup_steps 200 --eval_interval 100000"
python -m lab.sweep worth_small_tune $small --seed 7 --lr,beta2 \
    0.0045,0.95 0.0045,0.987 0.00225,0.95 0.00225,0.987 0.0016,0.987 0.0011,0.987
python -m lab.sweep worth_small $small --seed 5 6 8 9 --lr 0.0016 --beta2 0.987
python -m lab.table out/sweep/worth/*/ --out lab/results/worth
python -m lab.table out/sweep/worth_rates/*/ --out lab/results/worth_rates
python -m lab.table out/sweep/worth_batch/*/ --out lab/results/worth_batch
python -m lab.table out/sweep/worth_batch_tune/*/ --out lab/results/worth_batch_tune
python -m lab.table out/sweep/worth_muon/*/ --out lab/results/worth_muon
python -m lab.table out/sweep/worth_small/*/ --out lab/results/worth_small
python -m lab.table out/sweep/worth_small_tune/*/ --out lab/results/worth_small_tune

one="--batch_size 4 --lr 0.0045 --device cpu --dtype bf16 --seed 5 --eval_batches 1"
time="--ranks 1 --method minibatch --optimizer adamw muon $one"
python -m lab.sweep worth_time --max_steps 300 --eval_interval 300 $time
python -m lab.sweep worth_time --max_steps 100 --eval_interval 100000 --accum 4 $time
link="--ranks 2 --eval_interval 1000000 $one"
rounds="--outer_lr 0.5 --outer_momentum 0.8 --sync_warmup_steps 0 --link_mbps 0 10 $link"
python -m lab.sweep worth_link --method minibatch --link_mbps 0 100 1000 --max_steps 64 \
    --log_interval 16 $link
python -m lab.sweep worth_link --method edit streaming_edit --tau 16 --max_steps 144 \
    --log_interval 16 $rounds
python -m lab.sweep worth_link --method edit --tau 64 --max_steps 320 --log_interval 64 $rounds
python -m lab.table out/sweep/worth_time/*/ --show step_ms --out lab/results/worth_time
python -m lab.table out/sweep/worth_link/*/ --show step_ms --out lab/results/worth_link
python -m lab.worth --out lab/results/worth_over_link
