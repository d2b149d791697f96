# The same as outer_steps.sh in 2,000 steps, and with 2 and 4 bits. With Muon and tau 64 on a GPU.
set -e
run="--lr 0.0045 --batch_size 4 --sync_warmup_steps 32 --max_steps 2000 --eval_interval 2000"
muon="--optimizer muon --muon_lr 0.01"
one="--method one_bit_edit --warmup_format int8 $run --seed 7"
one="$one --outer_lr,outer_momentum 1,0 0.9,0.3 0.7,0.5 0.26,0.8 0.5,0.8 0.7,0.8"
all="$one --method diloco edit streaming_edit one_bit_edit"
python -m lab.sweep outer_steps_2000 --tau 16 64 --device cpu $all
python -m lab.sweep outer_steps_2000 --tau 16 $muon --device cpu $all
python -m lab.sweep outer_steps_2000 --tau 64 $muon --device cuda --backend shm $all
python -m lab.sweep outer_steps_2000 --tau 16 $muon --device cpu --quantize two_bits e3m0 $one
python -m lab.table out/sweep/outer_steps_2000/*/ --out lab/results/outer_steps_2000
