# What nobody has run: this code on two GPUs with NCCL. It takes a quarter of an hour and prints a
# block of JSON. Please paste it into an issue, also if something failed.
#
#   sh lab/experiments/two_gpus.sh      # on one machine; without GPUs it tries itself, with gloo
#
# On two machines with a GPU each, the same on both, the second one with --node_rank 1:
#   export GLOO_SOCKET_IFNAME=eth0
#   MACHINES="--nnodes 2 --node_rank 0 --master_addr 192.168.1.10 --master_port 29500" \
#       sh lab/experiments/two_gpus.sh
#
# (1) equal: four ranks, 2 replicas x 2 shards, fp64, each method with NCCL and with gloo on CPUs.
#     Their losses should agree to about 1e-9. Ranks that share a GPU each say that they are a host
#     of their own, and talk through sockets.
# (2) speed: two ranks, each a replica on a GPU of its own: the time of a step, and how long a sync
#     is waited for. EDiT should wait for less than DiLoCo.
# (3) order: the same with the four ranks of (1), with and without NCCL_LAUNCH_ORDER_IMPLICIT.
set -u
export OMP_NUM_THREADS=1
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
methods=${METHODS:-minibatch post_local_sgd diloco edit}
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
alone="--standalone --local_addr 127.0.0.1"
machines=${MACHINES:-$alone}
per_machine=2
[ "$machines" = "$alone" ] || per_machine=1

device=cpu backend=gloo
orders=1 # only NCCL knows the variable
large="--dtype fp32 --n_layer 2 --n_embd 64 --block_size 32 --batch_size 2"
medium=$large
if [ "$gpus" -gt 0 ]; then
    device=cuda backend=nccl
    orders="0 1"
    large="--model 124m --batch_size 8 --lr_warmup_steps 10"
    medium="--model 10m --batch_size 16"
fi

train() { # NAME, ENVIRONMENT, LAUNCHER, FLAGS: a run that leaves its record in $runs/NAME
    echo "$1" >&2
    name=$1 settings=$2 launcher=$3
    shift 3
    command="export $settings; exec python train.py \"\$@\""
    # shellcheck disable=SC2086
    timeout 300 torchrun $launcher --no-python sh -c "$command" sh "$@" --overwrite \
        --out_dir "$runs/$name" >"$runs/$name.txt" 2>&1 || tail -n 3 "$runs/$name.txt" >&2
}

small="--dtype fp64 --n_layer 2 --n_head 1 --n_embd 6 --block_size 8 --batch_size 2 --shards 2"
small="$small --max_steps 17 --eval_batches 1 --lr_warmup_steps 2 --log_interval 1"
four="$machines --nproc_per_node $((2 * per_machine))"
own='NCCL_HOSTID=host-$RANK NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket'
[ "$machines" = "$alone" ] && own="$own NCCL_SOCKET_IFNAME=lo"
[ "$gpus" -ge $((2 * per_machine)) ] && own="NCCL_DEBUG=WARN" # each rank has a GPU of its own
for method in $methods; do
    rounds="--sync_warmup_steps 3 --tau 4"
    [ "$method" = minibatch ] && rounds=""
    flags="--method $method $small $rounds"
    train "cpu-$method" A=1 "$alone --nproc_per_node 4" --device cpu --backend gloo $flags
    train "equal-$method" "$own" "$four" --device $device --backend $backend $flags
done

speed="--device $device --backend $backend --max_steps 48 --log_interval 1"
speed="$speed --eval_interval 1000 --eval_batches 1"
rounds="--sync_warmup_steps 4 --tau 4"
two="$machines --nproc_per_node $per_machine"
train speed-minibatch A=1 "$two" --method minibatch $speed $large
for method in diloco edit; do
    train "speed-$method" A=1 "$two" --method $method $rounds $speed $large
    for order in $orders; do
        train "order-$order-$method" "$own NCCL_LAUNCH_ORDER_IMPLICIT=$order" "$four" --shards 2 \
            --method $method $rounds $speed $medium
    done
done

case "$machines" in *"node_rank 1"*) exit 0 ;; esac # rank 0's machine has the records
python - "$runs" <<'PY'
import json
import sys
from pathlib import Path
from statistics import median

import torch

runs = Path(sys.argv[1])


def rows(name, *events):
    """Rows of a run that has ended."""
    try:
        found = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return []
    return [row for row in found if row["event"] in events] if found[-1]["event"] == "end" else []


def losses(name):
    return [row.get("loss", row.get("val_loss")) for row in rows(name, "step", "eval")]


def last_line(name):
    lines = (runs / f"{name}.txt").read_text().split("\n")
    lines = [line for line in lines if "error" in line.lower()]
    return lines[-1][:300] if lines else "it was too slow, or ended without a word"


gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
report = {"torch": torch.__version__, "nccl": nccl, "gpus": gpus}
report |= {"largest difference of losses": {}, "step_ms": {}, "stall_ms of a sync": {}, "failed": {}}
for text in sorted(runs.glob("*.txt")):
    name = text.stem
    reference = name.replace("equal-", "cpu-")
    if not rows(name, "end") or not rows(reference, "end"):
        report["failed"][name] = last_line(name)
    elif name.startswith("equal-"):
        method = name.removeprefix("equal-")
        pairs = zip(losses(name), losses(f"cpu-{method}"), strict=True)
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        report["largest difference of losses"][method] = worst
    elif not name.startswith("cpu-"):
        report["step_ms"][name] = round(median(row["step_ms"] for row in rows(name, "step")[8:]), 2)
        stalls = [row["stall_ms"] for row in rows(name, "sync")[2:]]
        if stalls:
            report["stall_ms of a sync"][name] = round(median(stalls), 2)
print("```json")
print(json.dumps(report, indent=1))
print("```")
PY
