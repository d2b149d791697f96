#!/bin/bash
# For Slurm: 1 to 4 nodes of eight GPUs, one replica per node. All nodes must see my_corpus and out/ (a shared file system).
# Run . .venv/bin/activate before sbatch. Nobody has run this with Slurm or with NCCL yet. If the nodes have several
# networks, name the one between them: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
#SBATCH --nodes 4 --no-kill --exclusive --ntasks-per-node 1 --gpus-per-node 8
# 120 s before the time limit torchrun gets SIGTERM and passes it on to its ranks: they end their round and save.
# 30 s later torchrun kills them. From torch 2.13 on, torchrun --shutdown_timeout 100 gives them 100 s. If a round
# takes longer, the steps since the last checkpoint are repeated: then choose a smaller --checkpoint_interval.
# Not SIGUSR1, the usual warning: torchrun does not know it and dies of it.
#SBATCH --signal=TERM@120
# The first node holds the rendezvous. If it dies, torchrun ends on all nodes: submit this script again, and the run
# continues from its last checkpoint. If another node dies, the others go on.
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A node that joins gives the others 30 s to end their round and save. If that is too short, the run
# continues from its last checkpoint.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # torch 2.13 cannot let a node join without it
# If NCCL waits for --timeout_s in vain, each rank writes its last operations to a file (~/.cache/torch/comm_lib_trace_rank_N,
# or what TORCH_FR_DUMP_TEMP_FILE says). Compare them: the operation that one rank lacks is the culprit.
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
srun --kill-on-bad-exit=0 torchrun --nnodes "1:$SLURM_NNODES" --max-restarts 5 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint "$HOST:29500" train.py --model 1b --data my_corpus --shards 8 --tokens_per_step 786432 --checkpoint_interval 1000 --resume auto --save_on_exit
