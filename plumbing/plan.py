"""Memory per rank, tokens and traffic per round of a run, computed before it starts.

    python train.py --model 7b --replicas 8 --shards 8 --device cuda --dry_run --link_mbps 100000

Every run prints this first. With --dry_run it is all that happens, for any mesh, on any machine.

P: elements of a layer's flat vector. Not counted: the program itself (some 300 MB on CPUs), NCCL's
buffers, what the allocator does not give back.
"""

import os

import torch

import model
from model import ModelConfig
from plumbing.config import UserError
from plumbing.shm import SLOTS, machine_id
from quantize import bytes_per_element
from shard import Layout
from simulate import FRAMING

# Numbers that a block's backward needs, per token and channel: counted, see tests/test_plan.py.
KEPT = 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class Plan:
    """The figures of one run. config: all its flags; method: a Method subclass."""

    def __init__(self, config, method, vocab_size: int, world_size: int):
        self.config, self.method = config, method
        self.vocab_size, self.world_size = vocab_size, world_size
        if config.n_embd % (2 * config.n_head):
            raise UserError(
                f"--n_embd {config.n_embd} --n_head {config.n_head}: "
                "channels per head must be a whole, even number"
            )
        self.shards, self.replicas = config.shards, world_size // config.shards
        self.model_config = ModelConfig(
            config.n_layer, config.n_head, config.n_embd, config.block_size, vocab_size,
            config.n_hidden, config.rope_base, config.norm_eps,
        )  # fmt: skip
        with torch.device("meta"):  # shapes without memory
            layers = [model.make_layer(self.model_config, l) for l in (0, 1, -1)]
        embedding, block, head = (Layout(layer, self.shards) for layer in layers)
        self.layouts = [embedding, *[block] * config.n_layer, head]
        self.n_params = sum(layout.used for layout in self.layouts)
        self.dtype = DTYPES[config.dtype]
        self.master = torch.promote_types(self.dtype, torch.float32)
        self.shard_bytes = sum(each.shard_size for each in self.layouts) * self.master.itemsize
        self.on_cpu = config.device == "cpu"
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
            below = f"{sequences * one} or " if sequences else ""
            reason = f"{self.world_size} ranks take {below}{(sequences + 1) * one}"
            reason = reason if rest else "it rules the micro-steps; leave out --accum"
            raise UserError(f"--tokens_per_step {config.tokens_per_step}: {reason}")
        fits = range(min(config.batch_size, sequences), 0, -1)
        batch_size = next(n for n in fits if sequences % n == 0)
        return batch_size, sequences // batch_size

    def memory(self) -> dict:
        """Bytes that one rank holds for good, by kind."""
        vectors, alone = self.method.shared + self.method.private, self.shards == 1
        outer = " and ".join(vectors)
        if not self.on_cpu and getattr(self.config, "offload", False):
            outer += " on the host"
        aliased = alone and self.dtype == self.master  # a layer is a view of the parameters
        largest = max(layout.padded for layout in self.layouts)  # max P
        kinds = {
            "parameters": self.shard_bytes,  # 4 sum P/N
            "gradient": self.shard_bytes,
            "AdamW": 2 * self.shard_bytes,  # two moments
            outer: len(vectors) * self.shard_bytes,
            "sync buffers": round(self.config.buffer_vectors * self.shard_bytes),
            "two whole layers": 0 if aliased else 2 * largest * self.dtype.itemsize,
            "a layer's gradient": 0 if alone else largest * self.master.itemsize,
            "shared memory": self.shared_bytes(largest),
        }
        return {kind: count for kind, count in kinds.items() if count}

    def shared_bytes(self, largest: int) -> int:
        """Slots of shm that a rank reads or writes, its own and its neighbours'. largest: max P."""
        config, M, N = self.config, self.replicas, self.shards
        if config.backend not in ("auto", "shm") or not self.on_cpu or not machine_id():
            return 0
        layers = self.dtype.itemsize + 2 * self.master.itemsize if N > 1 else 0
        syncs = self.master.itemsize * M / N if M > 1 and self.method.barrier else 0
        return round(SLOTS * largest * (layers + syncs))

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
        return numbers * self.dtype.itemsize + (2 * logits + wide) * self.master.itemsize

    def check_memory(self):
        """Raise UserError if the ranks of this machine need more than it has."""
        ranks, elsewhere = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), ("shared memory", "the host")
        kinds = [n for kind, n in self.memory().items() if not kind.endswith(elsewhere)]
        needed = sum(kinds) + self.activations()
        if self.on_cpu:
            there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            devices = min(ranks, torch.cuda.device_count())
            there = devices * torch.cuda.get_device_properties(0).total_memory
        if ranks * needed > there:
            raise UserError(
                f"a rank needs about {size(needed)} of memory, and {ranks} here have {size(there)} "
                "together: lower --batch_size or the model's size, or use more --shards"
            )

    def sync_bytes(self) -> float:
        """What one rank sends over the slow links at a sync, without the row of scalars."""
        vectors = self.config.sent_vectors(self.replicas)
        if hasattr(self.config, "averaged_moments"):  # mini-batch has none
            widths = [bytes_per_element(form) / 4 for _, form in self.config.averaged_moments()]
            vectors += sum(widths) * 2 * (self.replicas - 1) / self.replicas
        return vectors * self.shard_bytes

    def show(self, corpus):
        config, M, N = self.config, self.replicas, self.shards
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in self.memory().items())
        lines = [
            f"{config.method} on {self.world_size} ranks = {M} replicas x {N} shards "
            f"({config.device}, {str(self.dtype).removeprefix('torch.')})",
            *("    " + line for line in picture(M, N)),
            f"model   {self.n_params:,} parameters: {config.n_layer} blocks, "
            f"{config.n_head} heads, {config.n_embd} channels, context {config.block_size}, "
            f"vocabulary {self.vocab_size}",
            f"data    {config.data or 'standard library'}: {len(corpus.tokens):,} tokens, "
            f"{'tokenizer.json' if '{' in corpus.tokenizer else corpus.tokenizer} ({corpus.hash})",
            f"memory  per rank: {kinds}; activations about {size(self.activations())}",
            f"step    {self.world_size} ranks x {self.accum} micro-steps "
            f"x {self.batch_size} sequences x {config.block_size} tokens "
            f"= {self.tokens_per_step:,} tokens",
        ]
        if self.vocab_size == 257 and config.model not in ("tiny", "10m") and not config.init_from:
            gpt2 = self.n_params + 2 * (50257 - self.vocab_size) * config.n_embd
            more = f"with gpt2 tokens (data.py --tokenizer gpt2) it would have {gpt2:,} parameters"
            lines.insert(-3, f"        its tokens are bytes; {more}")
        if config.compile:
            lines.append("compile the first steps compile the layers, which takes a minute or more")
        warmup = vars(config).get("sync_warmup_steps", 0)  # mini-batch has no such flag
        if warmup:
            last = min(warmup, config.max_steps)
            then = f"{config.method} begins" if warmup < config.max_steps else "the run is over"
            which = f"steps 1 to {last} average gradients (--sync_warmup_steps {warmup})"
            lines.append(f"warm-up {which}, then {then}")
        print("\n".join(lines + (self.round_lines() if M > 1 else [])) + "\n", flush=True)

    def round_lines(self) -> list:
        config, tokens = self.config, self.tokens_per_step
        sent = f"{size(self.sync_bytes())} per rank over the slow links"
        if hasattr(config, "tau_time_s"):
            lines = [f"round   {config.tau_time_s:g} s of training: {sent}"]
        elif hasattr(config, "tau"):
            steps = f"{config.tau} steps x {tokens:,} tokens = {config.tau * tokens:,} tokens"
            lines = [f"round   {steps}: {sent} (mini-batch: x {config.tau})"]
        else:
            lines = [f"round   every step: {sent}"]
        if config.link_mbps:
            wire_s = self.shards * self.sync_bytes() * 8 * FRAMING / (config.link_mbps * 1e6)
            rate = f"{config.link_mbps:,.0f} Mbit/s per replica"
            lines.append(f"link    at {rate} a sync takes {wire_s:.3g} s")
        return lines


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e10 else f"{count / 1e9:.2f} GB"


def picture(replicas: int, shards: int) -> list:
    """The grid as lines of text, at most 4 rows and columns of it."""
    columns = range(min(shards, 4))
    head = " " * 13 + "".join(f"shard {n:<5}" for n in columns)
    lines = [head + ("..." if shards > 4 else "")]
    for replica in range(min(replicas, 4)):
        ranks = "".join(f"rank {replica * shards + n:<6}" for n in columns)
        lines.append(f"replica {replica:<5}{ranks}")
    return lines + (["..."] if replicas > 4 else [])
