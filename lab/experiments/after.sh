# Does a model that was trained in rounds learn another text as well as one that was not? First EDiT
# trains for 1,000 steps, and averaged gradients for fewer: for each seed so many that both have
# about the same loss (guessed from the losses of 660 and 690 steps). Then both go on with averaged
# gradients, in C++: the headers of torch.
set -e
run="--plain --jobs 2 --replicas 4 --device cpu --dtype bf16 --batch_size 4"
long="--lr 0.0045 --eval_interval 100000 $run"
python -m lab.sweep equal --method edit --max_steps 1000 --tau 16 --sync_warmup_steps 32 \
    --seed 5 6 8 9 10 11 12 13 $long
python -m lab.sweep equal --method minibatch \
    --max_steps,seed 630,5 655,6 623,8 724,9 734,10 621,11 685,12 710,13 $long
python -m lab.table out/sweep/equal/*/ --out lab/results/equal

mkdir -p out/after/text
include=$(python -c "import torch; print(torch.__path__[0])")/include
for file in "$include"/c10/*/*.h "$include"/ATen/core/*.h "$include"/torch/csrc/*/*.h; do
    cp "$file" "out/after/text/$(basename "$(dirname "$file")")-$(basename "$file").txt"
done
[ -d out/after/headers ] || python data.py --input out/after/text/*.txt --out out/after/headers
for seed in 5 6 8 9 10 11 12 13; do
    cp out/sweep/equal/seed=$seed-*/model.pt out/after/edit.pt
    cp out/sweep/equal/max_steps=*,seed=$seed-*/model.pt out/after/averaged_gradients.pt
    python -m lab.sweep after --init_from out/after/edit.pt out/after/averaged_gradients.pt \
        --data out/after/headers --method minibatch --max_steps 240 --eval_interval 60 \
        --lr_warmup_steps 24 --lr 0.0015 0.0045 --seed $seed $run
done
base="--base init_from=out/after/averaged_gradients.pt"
python -m lab.table out/sweep/after/*/ $base --at 60 --out lab/results/after_60
python -m lab.table out/sweep/after/*/ $base --at 120 --out lab/results/after_120
python -m lab.table out/sweep/after/*/ $base --at 240 --out lab/results/after_240
