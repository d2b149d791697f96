# How few bits, how long a round? Muon inside. Each number of bits has the outer step that is best
# for rounds of 16 steps, so rounds of 4 and of 64 are not fairly compared.
set -e
run="--tau 4 16 64 --optimizer muon --lr 0.0045 --muon_lr 0.01 --batch_size 4 --max_steps 2000"
run="$run --sync_warmup_steps 32 --eval_interval 2000 --device cpu --seed 7"
one="--method one_bit_edit --warmup_format int8 $run"
python -m lab.sweep bits --method edit --outer_lr 0.7 --outer_momentum 0.8 $run
python -m lab.sweep bits --quantize sign --outer_lr 0.9 --outer_momentum 0.3 $one
python -m lab.sweep bits --quantize two_bits e3m0 --outer_lr 0.5 --outer_momentum 0.8 $one
python -m lab.table out/sweep/bits/*/ --out lab/results/bits
