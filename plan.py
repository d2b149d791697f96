"""What a run takes, worked out before it starts: memory per rank, tokens and traffic per round.

    python train.py --model 7b --replicas 8 --shards 8 --device cuda --dry_run --link_mbps 100000

Every run prints this first; with --dry_run it is all that happens, for any mesh, on any machine:
nothing of the model is allocated.

    what a rank holds     bytes                      P: elements of a layer; C, T, L, V: model.py's
    parameters, gradient  4 sum P/N each             fp32
    AdamW                 8 sum P/N                  two moments
    anchor, momentum      4 sum P/N each             methods with an outer step;
                                                     on the host with --offload
    two whole layers      2 max P * (4 or 2)         in the compute dtype; none if N = 1 in fp32
    a layer's gradient    4 max P, on a GPU 8 max P  in the making; on its way. None if N = 1
    outboxes              8 max P                    CPU: on its way to shards and replicas
                            + (16 or 12) max P/N     on this machine
    activations, about    B T C * (24 L + 24)        24 numbers per token and channel,
                            * (4 or 2)               with --recompute 1
                            + 16 B T V               for the loss: no more than LOGITS at a time
                            + 2 B T^2 H L            softmax in bf16 on a CPU, see model.attend

What is exact is in `memory`, what is not in `activations`. Not counted: the program itself (some
300 MB on the CPU), NCCL's buffers, what the allocator does not give back.
"""

from dataclasses import dataclass

import torch

import model
from model import ModelConfig
from outbox import SLOTS, slot_sizes
from shard import Layout
from simulate import FRAMING

# numbers that a block's backward needs, per token and channel: counted, see tests/test_plan.py
KEPT = 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Plan:
    """The figures of one run. setup: config.Setup."""

    setup: object
    world_size: int

    def __post_init__(self):
        config = self.setup.config
        self.shards, self.replicas = config.shards, self.world_size // config.shards
        self.model_config = model_config(config, self.setup.corpus.vocab_size)
        with torch.device("meta"):  # shapes without memory
            embedding, block, head = (model.make_layer(self.model_config, l) for l in (0, 1, -1))
        block = Layout(block, self.shards)
        self.layouts = [Layout(embedding, self.shards), *[block] * config.n_layer]
        self.layouts.append(Layout(head, self.shards))
        self.n_params = sum(layout.used for layout in self.layouts)
        self.dtype = DTYPES[config.dtype]
        self.master = torch.promote_types(self.dtype, torch.float32)
        self.shard_bytes = sum(layout.piece for layout in self.layouts) * self.master.itemsize
        self.on_cpu = config.device == "cpu"
        self.tokens_per_micro_step = config.batch_size * config.block_size
        self.tokens_per_step = self.world_size * config.accum * self.tokens_per_micro_step

    def memory(self) -> dict:
        """Bytes that one rank holds for good, by kind."""
        outer = self.setup.method_config.n_outer_vectors
        whole = max(layout.padded for layout in self.layouts)
        alone = self.shards == 1
        gathered = 0 if alone and self.dtype == self.master else 2 * whole * self.dtype.itemsize
        in_the_making = 0 if alone else whole * self.master.itemsize * (1 if self.on_cpu else 2)
        kinds = {
            "parameters": self.shard_bytes,
            "gradient": self.shard_bytes,
            "AdamW": 2 * self.shard_bytes,
            "anchor and momentum": outer * self.shard_bytes,
            "two whole layers": gathered,
            "a layer's gradient": in_the_making,
            "outboxes": sum(sum(both) for both in self.outboxes().values()),
        }
        if not self.on_cpu and getattr(self.setup.method_config, "offload", False):
            kinds["anchor and momentum on the host"] = kinds.pop("anchor and momentum")
        return {kind: count for kind, count in kinds.items() if count}

    def outboxes(self) -> dict:
        """Bytes of this rank's two outboxes, for gathers and
        sums, in its groups, if these are on one machine."""
        whole = max(layout.padded for layout in self.layouts)
        sizes = slot_sizes(self.shards, whole * self.dtype.itemsize, whole * self.master.itemsize)
        ranks = {"shard": self.shards, "sync": self.replicas}
        there = {name: SLOTS if self.on_cpu and ranks[name] > 1 else 0 for name in ranks}
        return {name: tuple(there[name] * size for size in both) for name, both in sizes.items()}

    def seen(self) -> int:
        """Bytes of other ranks' outboxes that this rank reads:
        the system counts them among its own as well."""
        (gathers, sums), of_sync = self.outboxes().values()
        of_shards = (self.shards - 1) * (gathers + sums // self.shards)
        return of_shards + (self.replicas - 1) * sum(of_sync)

    def activations(self) -> int:
        """About how many bytes the activations of one micro-step take at their peak."""
        config, tokens = self.setup.config, self.tokens_per_micro_step
        layers = config.n_layer + KEPT if config.recompute else KEPT * (config.n_layer + 1)
        numbers = tokens * config.n_embd * layers
        # model.attend's softmax
        if self.on_cpu and self.dtype == torch.bfloat16 and config.block_size <= 1024:
            blocks = 1 if config.recompute else config.n_layer
            numbers += blocks * tokens * config.n_head * config.block_size
        of_layers = numbers * self.dtype.itemsize
        logits = min(tokens * self.model_config.vocab_size, model.LOGITS)
        return of_layers + 4 * logits * self.master.itemsize

    def sync_bytes(self) -> float:
        """What one rank sends over the slow links in an exchange, but for a few norms."""
        return 2 * (self.replicas - 1) / self.replicas * self.shard_bytes

    def sync_s(self, mbps: float) -> float:
        """Seconds on the wire of one exchange, if each
        replica has a link of `mbps` to the others."""
        return self.shards * self.sync_bytes() * 8 * FRAMING / (mbps * 1e6)

    def show(self):
        config, corpus = self.setup.config, self.setup.corpus
        print(
            f"{config.method} on {self.world_size} ranks = "
            f"{self.replicas} replicas x {self.shards} shards "
            f"({config.device}, {str(self.dtype).removeprefix('torch.')})"
        )
        for line in picture(self.replicas, self.shards):
            print("    " + line)
        print(
            f"model   {self.n_params:,} parameters: {config.n_layer} blocks, "
            f"{config.n_head} heads, {config.n_embd} channels, context {config.block_size}, "
            f"vocabulary {corpus.vocab_size}"
        )
        print(
            f"data    {config.data or 'standard library'}: {len(corpus.tokens):,} tokens, "
            f"{corpus.tokenizer} ({corpus.hash})"
        )
        kinds = ", ".join(f"{kind} {size(count)}" for kind, count in self.memory().items())
        print(f"memory  per rank: {kinds}; activations about {size(self.activations())}")
        print(
            f"step    {self.world_size} ranks x {config.accum} micro-steps "
            f"x {config.batch_size} sequences x {config.block_size} tokens "
            f"= {self.tokens_per_step:,} tokens"
        )
        if self.replicas > 1:
            self.show_round()

    def show_round(self):
        config, method_config = self.setup.config, self.setup.method_config
        each = f"{size(self.sync_bytes())} per rank over the slow links"
        tau, tokens = getattr(method_config, "tau", None), self.tokens_per_step
        if hasattr(method_config, "tau_time_s"):
            print(f"round   {method_config.tau_time_s:g} s of training: {each}")
        elif tau:
            print(
                f"round   {tau} steps x {tokens:,} tokens = {tau * tokens:,} tokens: "
                f"{each} (mini-batch: x {tau})"
            )
        else:
            print(f"round   every step: {each}")
        given = self.setup.simulation.link_mbps
        if given or config.dry_run:
            rates = [given] if given else [1e3, 1e4, 1e5]
            speeds = " / ".join(f"{mbps:,.0f}" for mbps in rates)
            seconds = " / ".join(f"{self.sync_s(mbps):.3g}" for mbps in rates)
            print(
                f"link    at {speeds} Mbit/s per replica an exchange is on the wire for {seconds} s"
            )


def model_config(config, vocab_size: int) -> ModelConfig:
    return ModelConfig(config.n_layer, config.n_head, config.n_embd, config.block_size, vocab_size)


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e10 else f"{count / 1e9:.2f} GB"


def picture(replicas: int, shards: int, most: int = 4) -> list:
    """The grid as lines of text, at most `most` rows and columns of it."""
    columns = range(min(shards, most))
    head = " " * 13 + "".join(f"shard {n:<5}" for n in columns)
    lines = [head + ("..." if shards > most else "")]
    for replica in range(min(replicas, most)):
        ranks = "".join(f"rank {replica * shards + n:<6}" for n in columns)
        lines.append(f"replica {replica:<5}{ranks}")
    return lines + (["..."] if replicas > most else [])
