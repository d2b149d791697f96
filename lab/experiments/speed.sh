# How fast is a step of averaged gradients beside FSDP2? 10.8 million parameters; 162 on a GPU.
set -e
export OMP_NUM_THREADS=1
for dtype in fp32 bf16; do
    torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 -m lab.bench --shards 2 --repeats 7 --dtype $dtype
    torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 -m lab.bench --shards 2 --repeats 7 --dtype $dtype
done
gpu="--device cuda --model 124m --vocab_size 50304 --batch_size 16"
python -m lab.bench $gpu
python -m lab.bench $gpu --compile
