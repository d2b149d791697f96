"""Memory per rank, tokens and traffic per round of a run, computed before it starts.

    python train.py --model 7b --replicas 8 --shards 8 --device cuda --dry_run --link_mbps 100000

Every run prints this first. With --dry_run it is all that happens, for any mesh, on any machine.

P: elements of a layer's flat vector. Not counted: the program itself (some 300 MB on CPUs), what
the allocator does not give back.
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
NCCL_BYTES = 2e9  # its buffers and kernels take 0.5 to 2 GB
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Plan:
    """The figures of one run. config: all its flags; method: a Method subclass."""

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
        self.batch_size, self.accum = self.micro_steps()
        self.tokens_per_micro_step = self.batch_size * config.block_size
        self.tokens_per_step = world_size * self.accum * self.tokens_per_micro_step

    def micro_steps(self) -> tuple:
        """(sequences per rank and micro-step, micro-steps per step). With --tokens_per_step a rank
        has as few micro-steps as --batch_size allows."""
        config, one = self.config, self.world_size * self.config.block_size  # a sequence per rank
        if not config.tokens_per_step:
            return config.batch_size, config.accum
        sequences, rest = divmod(config.tokens_per_step, one)
        if rest or config.accum > 1:
            nearest = " or ".join(str(n * one) for n in (sequences, sequences + 1) if n)
            needs = f"{self.world_size} ranks take {nearest}" if rest else "leave out --accum"
            raise UserError(f"--tokens_per_step {config.tokens_per_step}: {needs}")
        fits = range(1, min(config.batch_size, sequences) + 1)
        batch_size = max(n for n in fits if sequences % n == 0)
        return batch_size, sequences // batch_size

    def memory(self) -> dict:
        """Bytes that one rank holds for good, by kind."""
        shared, private, M, N = self.method.shared, self.method.private, self.replicas, self.shards
        offload = not self.on_cpu and self.config.offload
        aliased = N == 1 and self.dtype == self.master  # a layer is a view of the parameters
        layer = max(layout.padded for layout in self.layouts)  # max P
        block = self.layouts[1].padded * self.dtype.itemsize
        # Slots of shm that a rank reads or writes, its own and its neighbours'
        slots = 0.0  # for each layer in turn, bytes per element
        gathered = 0.0  # for more than a layer, in vectors
        if self.config.backend == "shm" and self.on_cpu and machine_id():
            slots += self.dtype.itemsize + (2 - 1 / N) * self.master.itemsize if N > 1 else 0
            if M > 1 and self.method.barrier:
                slots += self.master.itemsize * M / N
                gathered = self.config.gathered_vectors(M)
        kinds = {
            "parameters": self.shard_bytes,  # 4 sum P/N
            "gradient": self.shard_bytes,
            OPTIMIZERS[self.config.optimizer]: self.shard_bytes + self.square_bytes(),  # moments
            " and ".join(shared) + " on the host" * offload: len(shared) * self.shard_bytes,
            " and ".join(private): len(private) * self.shard_bytes,
            "sync buffers": round(self.config.buffer_vectors * self.shard_bytes),
            "two whole layers": 0 if aliased else 2 * layer * self.dtype.itemsize,
            "a layer's gradient": 0 if N == 1 else layer * self.master.itemsize,
            "Muon's buffer, a block": block * (aliased and self.config.optimizer == "muon"),
            "shared memory": round(SLOTS * (layer * slots + gathered * self.shard_bytes)),
            "NCCL": NCCL_BYTES if self.config.backend == "nccl" and self.world_size > 1 else 0,
        }
        return {kind: count for kind, count in kinds.items() if count}

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

    def check_memory(self):
        """Raise UserError if this machine, or a GPU, has too little memory. On a GPU activations
        do not count: how many there are depends on its kernels."""
        elsewhere = [kind for kind in self.memory() if "shared" in kind or "on the host" in kind]
        needed = sum((self.memory() | dict.fromkeys(elsewhere, 0)).values())
        if self.on_cpu:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            needed += self.activations()
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
        vectors = self.config.sent_vectors(self.replicas)
        vectors += len(self.config.averaged_moments()) * 2 * (self.replicas - 1) / self.replicas
        return vectors * self.shard_bytes

    def show(self, corpus):
        config, M, N = self.config, self.replicas, self.shards
        grid = np.array2string(np.arange(M * N).reshape(M, N), threshold=32, prefix=" " * 8)
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in self.memory().items())
        lines = [
            f"{config.method} on {self.world_size} ranks = {M} replicas x {N} shards "
            f"({config.device}, {str(self.dtype).removeprefix('torch.')})",
            f"ranks   {grid}: a row is a replica",
            f"model   {self.n_params:,} parameters: {self.model_config}",
            f"data    {config.data or 'standard library'}: {len(corpus.tokens):,} tokens, "
            f"{'tokenizer.json' if '{' in corpus.tokenizer else corpus.tokenizer} ({corpus.hash})",
            f"memory  per rank: {kinds}; activations about {size(self.activations())}",
            f"step    {self.world_size} ranks x {self.accum} micro-steps "
            f"x {self.batch_size} sequences x {config.block_size} tokens "
            f"= {self.tokens_per_step:,} tokens",
        ]
        if self.vocab_size == 257 and config.model not in ("tiny", "10m") and not config.init_from:
            gpt2 = self.n_params + 2 * (50257 - 257) * config.n_embd
            more = f"with gpt2 tokens (data.py --tokenizer gpt2) it would have {gpt2:,} parameters"
            lines.append(f"tokens  bytes; {more}")
        if config.compile:
            lines.append("compile the first steps compile the layers, which takes a minute or more")
        if warmup := vars(config).get("sync_warmup_steps"):  # mini-batch has no such flag
            then = f"{config.method} begins" if warmup < config.max_steps else "the run is over"
            first = f"steps 1 to {min(warmup, config.max_steps)} average gradients"
            lines.append(f"warm-up {first} (--sync_warmup_steps {warmup}), then {then}")
        if M > 1:
            length = config.describe_round(self.tokens_per_step)
            sync_bytes = self.sync_bytes()
            lines.append(f"round   {length}: {size(sync_bytes)} per rank over the slow links")
        if M > 1 and config.link_mbps:
            sync_s = N * sync_bytes * 8 * FRAMING / (config.link_mbps * 1e6)
            rate = f"{config.link_mbps:,.0f} Mbit/s per replica"
            lines.append(f"link    at {rate} a sync takes {sync_s:.3g} s")
        print("\n".join(lines) + "\n", flush=True)


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e10 else f"{count / 1e9:.2f} GB"
