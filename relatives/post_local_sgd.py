"""Post Local SGD: averaged gradients first, then tau local steps between averages of parameters.

The problem. Averaging gradients in every step is slow, and large batches generalize worse. Post
Local SGD begins with averaged gradients, where progress is fast, and continues with local steps.

    sync_warmup_steps steps with averaged gradients; then repeat:
        tau inner steps: x_i <- AdamW(x_i)
        x_i <- 1/M sum_j x_j               # [sync] all-reduce per layer, once per round, blocking

M replicas, N shards, P elements of a layer. x_i is model.master, (sum P/N,): every rank its shard.
There is no outer optimizer and no vector between syncs. The inner AdamW's moments stay with their
replica.

Equal to SlowMo with --outer_lr 1 --outer_momentum 0, and to DiLoCo with the same flags.

Deviations from the paper and its authors' code: (1) The warm-up averages gradients, so the moments
of all replicas agree when the local steps begin; the code averages parameters after each worker's
own momentum step. (2) Rounds are counted from the end of the warm-up; the code counts from the
start of training. (3) The number of warm-up steps is a flag; the paper switches at the first drop
of the learning rate.

Slow-link bytes per rank and round: 2 (M-1)/M * 4 sum P/N, and 8 (M-1) for losses and steps.
Run: torchrun --nproc_per_node 4 train.py --method post_local_sgd --shards 2
Source: Post Local SGD, arXiv 1808.07217 (read: its code, epfml/LocalSGD-Code).
Plain version: plain/local.py.
"""

from method import Method


class PostLocalSGD(Method):
    def sync(self):
        # x_i <- 1/M sum_j x_j
        self.average(self.model.master)
