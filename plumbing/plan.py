"""Memory per rank, tokens and traffic per round of a run, computed before it starts.

    python train.py --model 7b --replicas 8 --shards 8 --device cuda --dry_run --link_mbps 100000

Every run prints this first. With --dry_run it is all that happens, for any mesh, on any machine.

P: elements of a layer's flat vector. Not counted: the program itself (on CPUs the 230 MB that
`import torch` takes), the corpus, what the allocator does not give back.
"""

import dataclasses
import os

import numpy as np
import torch

import model
from config import UserError
from model import ModelConfig
from plumbing.shm import SLOTS, machine_id
from plumbing.simulate import FRAMING
from shard import Layout

# Numbers that a block's backward needs, per token and channel: counted, see tests/test_plan.py.
KEPT = 24
KERNEL_BYTES = 75e6  # on CPUs: torch's kernels and threads, gloo; measured after a first step
NCCL_BYTES = 2e9  # its buffers and kernels take 0.5 to 2 GB
HOST = " (host)"  # in host memory
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Plan:
    """The figures of one run. config: all its flags; method: a Method subclass. micro_batch and
    micro_steps, of a rank: what --batch_size and --accum ask for, or --tokens_per_step."""

    def __init__(self, config, method, vocab_size: int, world_size: int):
        self.config, self.method = config, method
        self.vocab_size, self.world_size = vocab_size, world_size
        self.shards, self.replicas = config.shards, world_size // config.shards
        self.on_cpu = config.device == "cpu"
        if config.n_embd % (2 * config.n_head):
            raise UserError(f"--n_embd {config.n_embd}: must be a multiple of 2 x --n_head")
        shape = {f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig)}
        self.model_config = ModelConfig(**shape | {"vocab_size": vocab_size})
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
            self.divide(config.tokens_per_step)
        self.tokens_per_micro_step = self.micro_batch * config.block_size
        self.tokens_per_step = world_size * self.micro_steps * self.tokens_per_micro_step

    def divide(self, tokens: int):
        """As few micro-steps as --batch_size allows."""
        unit = self.world_size * self.config.block_size  # a sequence per rank
        sequences, rest = divmod(tokens, unit)
        if rest:
            hint = f"must be a multiple of {unit}, a sequence on each of {self.world_size} ranks"
            raise UserError(f"--tokens_per_step {tokens}: {hint}")
        if self.micro_steps > 1:
            raise UserError(f"--tokens_per_step {tokens}: it sets --accum; leave out --accum")
        self.micro_batch = min(self.micro_batch, sequences)
        while sequences % self.micro_batch:
            self.micro_batch -= 1
        self.micro_steps = sequences // self.micro_batch

    def memory(self) -> dict:
        """Bytes that one rank holds for good, by kind."""
        config, N = self.config, self.shards
        vector = self.shard_bytes  # 4 sum P/N
        muon = config.optimizer == "muon"
        aliased = N == 1 and self.dtype == self.master  # a layer is a view of the parameters
        layer = max(layout.padded for layout in self.layouts)  # max P
        place = HOST if config.offload and not self.on_cpu else ""

        moments = "Muon and AdamW" if muon else "AdamW"
        kinds = {"parameters": vector, "gradient": vector, moments: vector + self.square_bytes()}
        for name in self.method.shared:
            kinds[name + place] = vector
        for name in self.method.private:
            kinds[name] = vector
        kinds["sync buffers"] = round(config.buffer_vectors * vector)
        if not aliased:
            kinds["two whole layers"] = 2 * layer * self.dtype.itemsize
        elif muon:
            kinds["Muon's buffer, a block"] = self.layouts[1].padded * self.dtype.itemsize
        if N > 1:
            kinds["a layer's gradient"] = layer * self.master.itemsize
        kinds["shared memory"] = self.slot_bytes(layer)
        if self.on_cpu:
            kinds["torch's kernels"] = KERNEL_BYTES
        if config.backend == "nccl" and self.world_size > 1:
            kinds["NCCL"] = NCCL_BYTES
        return {kind: count for kind, count in kinds.items() if count}

    def slot_bytes(self, layer: int) -> int:
        """Of the slots of shm that a rank reads or writes, its own and its neighbours'. layer: P of
        the largest one."""
        M, N = self.replicas, self.shards
        if self.config.backend != "shm" or not self.on_cpu or not machine_id():
            return 0
        count = 0.0
        if N > 1:  # gathers, and sums of the own gradient with a piece of each other rank's
            count += layer * (self.dtype.itemsize + (2 - 1 / N) * self.master.itemsize)
        if M > 1 and self.method.barrier:
            count += layer * self.master.itemsize * M / N
            count += self.config.gathered_vectors(M) * self.shard_bytes
        return round(SLOTS * count)

    def square_bytes(self) -> int:
        """exp_avg_sq, of the last shard: with Muon not of the blocks' matrices."""
        if self.config.optimizer == "adamw":
            return self.shard_bytes
        embedding, *blocks, head = self.layouts
        elements = embedding.shard_size + head.shard_size
        for layout in blocks:
            elements += layout.shard_size - layout.border(layout.decayed, self.shards - 1)
        return elements * self.master.itemsize

    def activations(self) -> int:
        """About how many bytes the activations of one micro-step take at their peak."""
        config, tokens = self.config, self.tokens_per_micro_step
        layers = config.n_layer + KEPT if config.recompute else KEPT * (config.n_layer + 1)
        numbers = tokens * config.n_embd * layers
        # model.attend's softmax
        if self.on_cpu and self.dtype == torch.bfloat16 and config.block_size <= 1024:
            blocks = 1 if config.recompute else config.n_layer
            numbers += blocks * tokens * config.n_head * config.block_size
        logits = tokens * self.vocab_size
        # Embedding and head sum their gradients in fp32 (model.widen), one of them at a time.
        wide = 0 if self.dtype == self.master else 2 * self.vocab_size * config.n_embd
        head = (2 * logits + wide) * self.master.itemsize
        gradient = max(layout.used for layout in self.layouts) * self.dtype.itemsize  # of a layer
        return numbers * self.dtype.itemsize + max(head, gradient)

    def model_bytes(self) -> int:
        """What rank 0 takes more at the end, on the host: the whole model in fp32, for model.pt.
        The sync buffers are free then."""
        free = self.memory().get("sync buffers", 0) if self.on_cpu else 0
        return max(0, 4 * self.n_params - free)

    def check_memory(self):
        """Raise UserError if this machine, or a GPU, has too little memory. On a GPU activations
        do not count: how many there are depends on its kernels."""
        needed = 0
        for kind, count in self.memory().items():
            if kind != "shared memory" and not kind.endswith(" (host)"):
                needed += count
        if self.on_cpu:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            needed += self.activations() + self.model_bytes() / ranks
            there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            found = f"{ranks} here have {size(there)} together"
        else:
            ranks = 1
            there = torch.cuda.get_device_properties(0).total_memory  # all are alike
            found = f"its GPU has {size(there)}"
        if ranks * needed > there:
            hint = "lower --batch_size or the model's size, or use more --shards"
            raise UserError(f"a rank needs about {size(needed)} of memory, and {found}: {hint}")

    def sync_bytes(self) -> float:
        """What one rank sends over the slow links at a sync, without the row of scalars."""
        moments = len(self.config.averaged_moments()) * 2 * (self.replicas - 1) / self.replicas
        return (self.config.sent_vectors(self.replicas) + moments) * self.shard_bytes

    def show(self, corpus):
        config, M, N = self.config, self.replicas, self.shards
        grid = np.array2string(np.arange(M * N).reshape(M, N), threshold=32, prefix=" " * 8)
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in self.memory().items())
        dtype = str(self.dtype).removeprefix("torch.")
        tokenizer = "tokenizer.json" if "{" in corpus.tokenizer else corpus.tokenizer
        data = f"{config.data or 'standard library'}: {len(corpus.tokens):,} tokens, {tokenizer}"
        batch = f"{self.micro_batch} sequences x {config.block_size} tokens"

        print(f"{config.method} on {M * N} ranks = {M} replicas x {N} shards", end=" ")
        print(f"({config.device}, {dtype})")
        print(f"ranks   {grid}: a row is a replica")
        print(f"model   {self.n_params:,} parameters: {self.model_config}")
        print(f"data    {data} ({corpus.hash})")
        print(f"memory  per rank: {kinds}; activations about {size(self.activations())},", end=" ")
        print(f"for model.pt {size(self.model_bytes())} more on rank 0")
        print(f"step    {M * N} ranks x {self.micro_steps} micro-steps x {batch}", end=" ")
        print(f"= {self.tokens_per_step:,} tokens")
        if self.vocab_size == 257 and config.model not in ("tiny", "10m") and not config.init_from:
            gpt2 = self.n_params + 2 * (50257 - 257) * config.n_embd
            print("tokens  bytes; with gpt2 tokens (data.py --tokenizer gpt2) it", end=" ")
            print(f"would have {gpt2:,} parameters")
        if config.compile:
            print("compile the first steps compile the layers, which takes a minute or more")
        warmup = getattr(config, "sync_warmup_steps", 0)  # mini-batch has no such flag
        if warmup:
            print(f"warm-up steps 1 to {min(warmup, config.max_steps)} average gradients", end=" ")
            then = f"{config.method} begins" if warmup < config.max_steps else "the run is over"
            print(f"(--sync_warmup_steps {warmup}), then {then}")
        if M > 1:
            self.show_round()
        print(flush=True)

    def show_round(self):
        config = self.config
        sent = self.sync_bytes()
        length = config.describe_round(self.tokens_per_step)
        print(f"round   {length}: {size(sent)} per rank over the slow links")
        if config.link_mbps:
            sync_s = self.shards * sent * 8 * FRAMING / (config.link_mbps * 1e6)
            rate = f"{config.link_mbps:,.0f} Mbit/s per replica"
            print(f"link    at {rate} a sync takes {sync_s:.3g} s")


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e10 else f"{count / 1e9:.2f} GB"
