"""Memory per rank, tokens and traffic per round of a run, computed before it starts.

    python train.py --model 7b --replicas 8 --shards 8 --device cuda --dry_run --link_mbps 100000

Every run prints this first. With --dry_run it is all that happens, for any mesh, on any machine.

P: elements of a layer's flat vector. Not counted: the program itself (on CPUs the 230 MB that
`import torch` takes), the corpus, what the allocator does not give back.
"""

import math
import os

import numpy as np
import torch

import model
from config import UserError
from model import ModelConfig
from plumbing.shm import SLOTS
from plumbing.simulate import FRAMING
from shard import Layout

# Numbers that a block's backward needs, per token and channel: counted, see tests/test_plan.py.
KEPT = 24
KERNEL_BYTES = 75e6  # on CPUs: torch's kernels and threads, gloo; measured after a first step
NCCL_BYTES = 2e9  # its buffers and kernels take 0.5 to 2 GB
HOST = " (host)"  # in host memory, with --offload
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Plan:
    """The figures of one run. config: all its flags; method: a Method subclass. micro_batch and
    micro_steps, of a rank: what --batch_size and --accum ask for, or --tokens_per_step."""

    def __init__(self, config, method, vocab_size: int, world_size: int):
        self.config = config
        self.method = method
        self.shards = config.shards
        self.replicas = world_size // config.shards
        self.on_cpu = config.device == "cpu"
        if config.n_embd % (2 * config.n_head):
            raise UserError(f"--n_embd {config.n_embd}: must be a multiple of 2 x --n_head")
        shape = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
        shape["vocab_size"] = vocab_size
        self.model_config = ModelConfig(**shape)
        with torch.device("meta"):  # shapes without memory
            layers = [model.make_layer(self.model_config, l) for l in (0, 1, -1)]
        embedding, block, head = (Layout(layer, self.shards) for layer in layers)
        self.layouts = [embedding, *[block] * config.n_layer, head]
        self.n_params = sum(layout.used for layout in self.layouts)
        self.dtype = DTYPES[config.dtype]
        self.master = torch.promote_types(self.dtype, torch.float32)
        self.shard_bytes = sum(each.shard_size for each in self.layouts) * self.master.itemsize

        self.micro_batch = config.batch_size
        self.micro_steps = config.accum
        if config.tokens_per_step:
            self.divide(config.tokens_per_step, world_size)
        sequences = world_size * self.micro_steps * self.micro_batch
        self.tokens_per_step = sequences * config.block_size

    def divide(self, tokens: int, world_size: int):
        """As few micro-steps as --batch_size allows."""
        unit = world_size * self.config.block_size  # a sequence per rank
        sequences, rest = divmod(tokens, unit)
        if rest:
            raise UserError(
                f"--tokens_per_step {tokens}: must be a multiple of {unit}, "
                f"a sequence on each of {world_size} ranks"
            )
        if self.micro_steps > 1:
            raise UserError(
                f"--tokens_per_step {tokens}: it sets --accum; leave out --accum, "
                "or give --accum 1 or --tokens_per_step 0"
            )
        divisors = set()
        for d in range(1, math.isqrt(sequences) + 1):
            if sequences % d == 0:
                divisors |= {d, sequences // d}
        self.micro_batch = max(d for d in divisors if d <= self.micro_batch)
        self.micro_steps = sequences // self.micro_batch

    def memory(self) -> dict:
        """About how many bytes one rank holds at its peak, by kind."""
        config = self.config
        vector = self.shard_bytes  # 4 sum P/N
        layer = max(layout.padded for layout in self.layouts)  # max P
        embedding, block, *_, head = self.layouts
        muon = config.optimizer == "muon"
        kinds = {"parameters": vector, "gradient": vector}
        if muon:  # exp_avg_sq has no matrices of blocks
            squares = (embedding.shard_size + head.shard_size) * self.master.itemsize
            kinds["Muon and AdamW"] = vector + squares
        else:
            kinds["AdamW"] = 2 * vector
        place = ""
        if getattr(config, "offload", False) and not self.on_cpu:
            place = HOST
        for name in self.method.shared:
            kinds[name + place] = vector
        for name in self.method.private:
            kinds[name] = vector
        kinds["sync buffers"] = config.buffer_vectors * vector
        if self.shards > 1 or self.dtype != self.master:  # else a layer is a view of parameters
            kinds["two whole layers"] = 2 * layer * self.dtype.itemsize
        elif muon:
            kinds["Muon's buffer, a block"] = block.padded * self.dtype.itemsize
        if self.shards > 1:
            kinds["a layer's gradient"] = layer * self.master.itemsize
        if config.backend == "shm":
            kinds["shared memory"] = self.slot_bytes(layer)
        if self.on_cpu:
            kinds["torch's kernels"] = KERNEL_BYTES
        if config.backend == "nccl" and self.shards * self.replicas > 1:
            kinds["NCCL"] = NCCL_BYTES
        kinds["activations"] = self.activations()
        return {kind: count for kind, count in kinds.items() if count}

    def slot_bytes(self, layer: int) -> float:
        """Memory of the shm slots that a rank reads or writes, its own and its neighbours'. layer:
        P of the largest one."""
        M, N = self.replicas, self.shards
        count = 0.0
        if N > 1:  # gathers, and sums of the own gradient with a piece of each other rank's
            count += layer * (self.dtype.itemsize + (2 - 1 / N) * self.master.itemsize)
        if M > 1 and self.method.barrier:
            count += layer * self.master.itemsize * M / N
        return SLOTS * count

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, as PaLM counts them (arXiv 2204.02311): 6 for each
        parameter in a matrix product, and 12 n_layer C T for attention. What is recomputed does
        not count."""
        config = self.config
        multiplied = self.n_params - self.layouts[0].used  # the embedding is looked up
        return 6 * multiplied + 12 * config.n_layer * config.n_embd * config.block_size

    def activations(self) -> int:
        """Bytes of the activations of one micro-step, at their peak."""
        config = self.config
        T, C, V = config.block_size, config.n_embd, self.model_config.vocab_size
        tokens = self.micro_batch * T
        kept = KEPT * C  # numbers of a block, per token
        if self.on_cpu and self.dtype == torch.bfloat16 and T <= 1024:  # model.attend's softmax
            kept += config.n_head * T
        if config.recompute:
            numbers = tokens * (kept + config.n_layer * C)
        else:
            numbers = tokens * kept * (config.n_layer + 1)
        logits = 2 * tokens * V
        if self.dtype != self.master:  # model.widen: embedding and head sum gradients in fp32
            logits += 2 * V * C
        gradient = max(layout.used for layout in self.layouts) * self.dtype.itemsize  # of a layer
        return numbers * self.dtype.itemsize + max(logits * self.master.itemsize, gradient)

    def model_bytes(self) -> float:
        """What rank 0 takes more at the end, on the host: the whole model in fp32, for model.pt. On
        CPUs it takes the place of the sync buffers."""
        free = self.config.buffer_vectors * self.shard_bytes * self.on_cpu
        return max(0, 4 * self.n_params - free)

    def check_memory(self):
        """Raise UserError if the ranks of this machine, or the rank of a GPU, need more memory than
        it has. On a GPU activations do not count: how many there are depends on its kernels."""
        kinds = self.memory()
        kinds.pop("shared memory", None)  # shared
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found = f"{ranks} here have {size(there)} together"
        kinds["model.pt"] = self.model_bytes() / ranks  # on rank 0
        if not self.on_cpu:
            ranks = 1
            there = torch.cuda.get_device_properties(0).total_memory  # all are alike
            found = f"its GPU has {size(there)}"
            del kinds["activations"], kinds["model.pt"]
        needed = sum(count for kind, count in kinds.items() if not kind.endswith(HOST))
        if ranks * needed > there:
            raise UserError(
                f"a rank needs about {size(needed)} of memory, and {found}: "
                "lower --batch_size or the model's size, or use more --shards"
            )

    def sync_bytes(self) -> float:
        """What one rank sends over the slow links at a sync, without the row of scalars."""
        M = self.replicas
        moments = len(self.config.averaged_moments()) * 2 * (M - 1) / M
        return (self.config.sent_vectors(M) + moments) * self.shard_bytes

    def show(self, corpus):
        config, M, N = self.config, self.replicas, self.shards
        grid = np.array2string(np.arange(M * N).reshape(M, N), threshold=32, prefix=" " * 8)
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in self.memory().items())
        data = config.data or "standard library"
        print(
            f"{config.method} on {M * N} ranks = {M} replicas x {N} shards "
            f"({config.device}, {config.dtype})\n"
            f"ranks   {grid}: a row is a replica\n"
            f"model   {self.n_params:,} parameters: {self.model_config}\n"
            f"data    {data}: {len(corpus):,} tokens ({corpus.hash})\n"
            f"        {corpus.describe()}\n"
            f"memory  per rank, about: {kinds}; for model.pt {size(self.model_bytes())} more on "
            "rank 0\n"
            f"step    {M * N} ranks x {self.micro_steps} micro-steps x {self.micro_batch} "
            f"sequences x {config.block_size} tokens = {self.tokens_per_step:,} tokens"
        )
        if self.model_config.vocab_size > corpus.vocab_size:
            print(
                f"note    the vocabulary of {corpus.vocab_size:,} tokens is padded to "
                f"{self.model_config.vocab_size:,}, a multiple of 64; --vocab_size "
                f"{corpus.vocab_size} leaves it as it is"
            )
        warmup = config.sync_warmup_steps
        if 0 < warmup < math.inf:  # minibatch's never ends
            then = f"{config.method} begins"
            if warmup >= config.max_steps:
                then = "the run is over"
            last = min(warmup, config.max_steps)
            print(f"warm-up steps 1 to {last} average gradients, then {then}")
        self.show_note(warmup)
        if M > 1:
            sent = self.sync_bytes()
            print(
                f"round   {config.describe_round(self.tokens_per_step)}: "
                f"{size(sent)} per rank over the slow links"
            )
            if config.link_mbps:
                sync_s = N * sent * 8 * FRAMING / (config.link_mbps * 1e6)
                print(
                    f"link    at {config.link_mbps:,.0f} Mbit/s per replica a sync takes "
                    f"{sync_s:.3g} s"
                )
        print(flush=True)

    def show_note(self, sync_warmup: float):
        """A line if the learning rate rises for longer than one would expect."""
        config = self.config
        if config.lr_warmup_steps > config.max_steps:
            print(
                f"note    --lr_warmup_steps {config.lr_warmup_steps}: the run ends after "
                f"{config.max_steps} steps, so the learning rate never reaches --lr"
            )
        elif config.lr_warmup_steps > sync_warmup:
            print(
                f"note    --lr_warmup_steps {config.lr_warmup_steps}: rounds begin after "
                f"{sync_warmup} steps, while the learning rate still rises"
            )


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e10 else f"{count / 1e9:.2f} GB"
