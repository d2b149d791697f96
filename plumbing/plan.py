"""What a run takes, computed before it starts: memory, bytes, seconds.

    python train.py --model 7b --replicas 2 --shards 8 --device cuda --dry_run --link_mbps 10000

Every run prints its memory and its bytes first. With --dry_run nothing else happens, for any mesh,
on any machine, and the seconds are printed, too. The function for the seconds, costs(), is that of
lab/planner.py, which asks without a corpus and has flags for the speed of a GPU. explain.html
simulates what costs() computes.

P: elements of a layer's flat vector. Not counted in the memory: the program itself (on CPUs torch
takes some 300 MB), NCCL (0.5 to 2 GB), the corpus, what the allocator does not give back.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

import model
from config import NCCL_TIMEOUT_S, UserError
from model import ModelConfig
from plumbing.simulate import FRAMING
from shard import Layout

# Numbers per token and channel, counted (see test_plan.py):
KEPT = 24  # what a block's forward keeps for its backward
PASSED = 6  # what that backward has beside it at a time, most of it in the feed-forward layer
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
TFLOPS = 989  # peak of an H100 in bf16, without sparsity
MFU = 0.4  # the share of it that trainings of large models reach
BITS = {"streaming_edit": 4.125, "one_bit_edit": 1.125}  # per element; 32 in other rounds
# What rounds of so many steps keep of the speed: RESULTS.md, four replicas of 0.92 million
# parameters. Shorter ones keep at least as much, longer ones less.
ROUNDS_KEEP = {16: 0.71, 64: 0.48}


class Plan:
    """The figures of one run. config: all its flags; method: a Method subclass. micro_batch and
    micro_steps, of a rank: what --batch_size and --accum ask for, or --tokens_per_step."""

    def __init__(self, config, method, vocab_size: int, world_size: int):
        self.config = config
        self.method = method
        self.shards = config.shards
        self.replicas = world_size // config.shards
        self.on_cpu = config.device == "cpu"
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

    # ---- bytes ----

    def memory(self) -> dict:
        """About how many bytes one rank holds at its peak, by kind."""
        config = self.config
        vector = self.shard_bytes  # 4 sum P/N
        layer = max(layout.padded for layout in self.layouts)  # max P
        kinds = {"parameters": vector, "gradient": vector, "AdamW": 2 * vector}
        if config.optimizer == "muon":  # the blocks' matrices have one moment, not two
            embedding, *_, head = self.layouts
            squares = (embedding.shard_size + head.shard_size) * self.master.itemsize
            kinds["Muon and AdamW"] = kinds.pop("AdamW") - vector + squares
        on_host = getattr(config, "offload", False) and not self.on_cpu
        for name in self.method.vectors:
            if on_host and name in ("anchor", "momentum"):
                # torch rounds a pinned block up to a power of two
                kinds[f"{name} (host)"] = 1 << (vector - 1).bit_length()
            else:
                kinds[name] = vector
        kinds["sync buffers"] = config.buffer_vectors * vector
        if self.shards > 1 or self.dtype != self.master:  # else a layer is a view of parameters
            kinds["two whole layers"] = 2 * layer * self.dtype.itemsize
        if self.shards > 1:
            kinds["a layer's gradient"] = layer * self.master.itemsize
        kinds["activations"] = self.activations()
        return {kind: count for kind, count in kinds.items() if count}

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
            numbers = tokens * kept * config.n_layer
        numbers += tokens * PASSED * C
        logits = 2 * tokens * V
        if self.dtype != self.master:  # model.widen: embedding and head sum gradients in fp32
            logits += 2 * V * C
        gradient = max(layout.used for layout in self.layouts) * self.dtype.itemsize  # of a layer
        return numbers * self.dtype.itemsize + max(logits * self.master.itemsize, gradient)

    def sync_bytes(self) -> float:
        """What one rank sends over the slow links at a sync, without the row of scalars."""
        return self.config.sent_vectors(self.replicas) * self.shard_bytes

    # ---- seconds ----

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, as PaLM counts them (arXiv 2204.02311): 6 for each
        parameter in a matrix product, and 12 n_layer C T for attention. What is recomputed does
        not count."""
        config = self.config
        multiplied = self.n_params - self.layouts[0].used  # the embedding is looked up
        return 6 * multiplied + 12 * config.n_layer * config.n_embd * config.block_size

    def step_seconds(self, tflops: float = TFLOPS, mfu: float = MFU) -> float:
        """Seconds of computing in a step, if each rank is a GPU with this peak."""
        tokens = self.tokens_per_step / (self.replicas * self.shards)
        return tokens * self.flops_per_token() / (tflops * 1e12 * mfu)

    def run(self, step_s: float, bits: float = 32):
        """The Run whose costs lab/planner.py and --dry_run print."""
        config = self.config
        if hasattr(config, "tau_time_s"):  # A-EDiT's rounds end by the clock
            tau = max(1, round(config.tau_time_s / step_s))
        else:
            tau = getattr(config, "tau", 16)  # minibatch has none
        warmup = 0 if math.isinf(config.sync_warmup_steps) else config.sync_warmup_steps
        return Run(
            self.n_params, config.n_layer, step_s, self.replicas, tau, config.link_mbps, bits,
            self.tokens_per_step, config.max_steps, min(warmup, config.max_steps), self.micro_steps,
        )  # fmt: skip

    # ---- printing ----

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
            f"memory  per rank, about: {kinds}; for model.pt {size(4 * self.n_params)} on rank 0\n"
            f"step    {M * N} ranks x {self.micro_steps} micro-steps x {self.micro_batch} "
            f"sequences x {config.block_size} tokens = {self.tokens_per_step:,} tokens"
        )
        warmup = config.sync_warmup_steps
        if 0 < warmup < math.inf:  # minibatch's never ends
            then = f"{config.method} begins"
            if warmup >= config.max_steps:
                then = "the run is over"
            last = min(warmup, config.max_steps)
            print(f"warm-up steps 1 to {last} average gradients, then {then}")
        if M > 1:
            sent = self.sync_bytes()
            print(
                f"round   {config.describe_round(self.tokens_per_step)}: "
                f"{size(sent)} per rank over the slow links"
            )
            if config.link_mbps:
                print(
                    f"link    at {config.link_mbps:,.0f} Mbit/s per replica a sync takes "
                    f"{seconds(link_seconds(N * sent, config.link_mbps))}"
                )
        if M > 1 and config.dry_run:
            print(self.describe_seconds())
        print(flush=True)

    def describe_seconds(self) -> str:
        if not self.config.link_mbps:
            return "seconds give --link_mbps, the rate between the replicas"
        if self.on_cpu:
            run = self.run(step_s=1.0)
            return (
                f"seconds on CPUs: python -m lab.planner --parameters {run.parameters} "
                f"--layers {run.layers} --replicas {run.replicas} --shards {self.shards} "
                f"--tau {run.tau} --link_mbps {run.link_mbps:g} --accum {self.micro_steps} "
                "--step_s S, the time of your step"
            )
        step = f"a GPU makes {TFLOPS * MFU:.0f} TFLOP/s, an H100 at {MFU:.0%} of its peak"
        others = f"(others: lab.planner --accum {self.micro_steps})"
        return f"seconds if {step} {others}\n{describe(self.run(self.step_seconds()))}"


# ---- seconds of a run, on paper ----


@dataclass
class Run:
    """What the seconds depend on. The M replicas have equal speeds and links, the L layers equal
    sizes. A backward takes twice a forward. A replica has one link, without latency, and sends one
    layer after the other. Traffic inside a replica, outer steps and norms take no time."""

    parameters: float
    layers: int  # L
    step_s: float  # seconds that a replica computes in a step
    replicas: int  # M
    tau: int
    link_mbps: float  # of each replica to the others
    bits: float = 32  # per element of averaged gradients
    tokens_per_step: int = 0  # of all replicas
    max_steps: int = 0
    warmup_steps: int = 0  # of averaged gradients
    micro_steps: int = 1  # K, of a step
    kept: float = 0  # rounds need 1 / kept times the steps to the same loss; 0: rounds_keep(tau)


def costs(run: Run, method: str) -> dict:
    """What a steady round of a method costs:

    bits      of an element on the link
    sent, link_s    bytes of a replica in a sync, and their seconds on the link
    round_s   seconds of a round
    share     compute time / all time, 0 to 1
    worth     M x share, with rounds x kept: the time in which one replica alone reaches a loss,
              divided by the time of all
    run_s, run_bytes    of all steps with the warm-up; bytes of each replica
    """
    tau = 1 if method == "minibatch" else run.tau
    bits = run.bits if method == "minibatch" else BITS.get(method, 32)
    sent = sent_bytes(run, bits)
    link_s = link_seconds(sent, run.link_mbps)
    round_s = round_seconds(method, tau, run.step_s, link_s, run.layers, run.micro_steps)
    share = tau * run.step_s / round_s
    kept = 1 if method == "minibatch" else run.kept or rounds_keep(tau)
    found = {"bits": bits, "sent": sent, "link_s": link_s, "round_s": round_s, "share": share}
    found["worth"] = run.replicas * share * kept

    warmup, rounds = 0, run.max_steps / tau
    if method != "minibatch":
        warmup, rounds = run.warmup_steps, (run.max_steps - run.warmup_steps) / tau
    vector = sent_bytes(run, run.bits)  # a step of averaged gradients
    vector_s = link_seconds(vector, run.link_mbps)
    step_s = round_seconds("minibatch", 1, run.step_s, vector_s, run.layers, run.micro_steps)
    found["warmup_s"] = warmup * step_s
    found["warmup_bytes"] = warmup * vector
    found["run_s"] = found["warmup_s"] + rounds * round_s
    found["run_bytes"] = found["warmup_bytes"] + rounds * sent
    return found


def round_seconds(
    method: str, tau: int, step_s: float, link_s: float, layers: int, micro_steps: int = 1
) -> float:
    """Seconds of a round of tau steps, if what it sends takes link_s on the link.

    L layers; c = link_s / L, a layer on the link; f = step_s / 3 / L / K, the forward of a layer in
    one of K micro-steps

    minibatch       a layer is sent when its backward (2 f) in the last micro-step is done; the next
                    forward waits for all: max(step_s + c, step_s - 2 (L-1) f + L c)
    edit, a_edit,   layer l of the next forward waits for layer l:
    one_bit_edit    tau step_s + max(c, L c - (L-1) f), see edit.py
    co2, eager      the mean travels during the next round: max(tau step_s, L c)
    streaming_...   F = 4 fragments, each due some steps after it was sent (at most 2):
                    tau step_s + F max(0, L c / F - delay step_s)
    others          tau step_s + L c
    """
    c = link_s / layers
    f = step_s / 3 / layers / micro_steps
    if method == "minibatch":
        return max(step_s + c, step_s - 2 * (layers - 1) * f + link_s)
    if method in ("edit", "a_edit", "one_bit_edit"):
        return tau * step_s + max(c, link_s - (layers - 1) * f)
    if method in ("co2", "eager"):
        return max(tau * step_s, link_s)
    if method.startswith("streaming"):
        F = min(4, tau)
        delay = min(2, tau // F - 1)
        return tau * step_s + F * max(0, link_s / F - delay * step_s)
    return tau * step_s + link_s


def sent_bytes(run: Run, bits: float) -> float:
    """What a replica sends in an all-reduce of all parameters. Each of its N ranks sends 1/N."""
    return 2 * (run.replicas - 1) / run.replicas * run.parameters * bits / 8


def link_seconds(sent: float, link_mbps: float) -> float:
    return sent * 8 * FRAMING / (link_mbps * 1e6)


def rounds_keep(tau: int) -> float:
    """The share of their speed that rounds keep, as far as it was measured."""
    for most, share in ROUNDS_KEEP.items():
        if tau <= most:
            return share
    return min(ROUNDS_KEEP.values())


def smallest_tau(run: Run, method: str) -> int:
    """The smallest power of two with which a replica computes for 90% of the time."""
    tau = 1
    while costs(replace(run, tau=tau), method)["share"] < 0.9 and tau < 2**40:
        tau *= 2
    return tau


def links_for_rounds(run: Run) -> tuple:
    """From which link on EDiT is worth more than one replica alone, and from which one on averaged
    gradients are worth more than EDiT, in Mbit/s; infinite if that is never so."""

    def worth(method, mbps):
        return costs(replace(run, link_mbps=mbps), method)["worth"]

    alone = rising_zero(lambda mbps: worth("edit", mbps) - 1)
    return alone, rising_zero(lambda mbps: worth("minibatch", mbps) - worth("edit", mbps))


def rising_zero(f) -> float:
    """The x from 10^-3 to 10^9 from which on f(x) is above 0, or infinity."""
    low, high = 1e-3, 1e9
    if f(high) <= 0:
        return math.inf
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return high


NAMES = {
    "minibatch": "averaged gradients",
    "diloco": "DiLoCo",
    "edit": "EDiT",
    "streaming_edit": "Streaming EDiT",
    "one_bit_edit": "EDiT in 1 bit",
}


def describe(run: Run) -> str:
    """The costs as a table, and what follows from them."""
    M = run.replicas
    kept = run.kept or rounds_keep(run.tau)
    measured = ", of ".join(f"{most} kept {share}" for most, share in ROUNDS_KEEP.items())
    tokens = f" of {run.tokens_per_step:,} tokens" if run.tokens_per_step else ""
    lines = [
        f"        a step{tokens} (micro-steps: {run.micro_steps}) "
        f"computes for {seconds(run.step_s)}\n"
        f"        rounds of {run.tau} steps; {M} replicas, each with {run.link_mbps:,.0f} Mbit/s",
        f"{'method':20}{'bits':>6}{'a sync sends':>14}{'takes':>10}{'computes':>10}{'worth':>8}"
        f"{'tau for 90%':>13}{f'{run.max_steps:,} steps':>14}{'sent':>10}",
    ]
    for method, name in NAMES.items():
        found = costs(run, method)
        tau = "" if method == "minibatch" else smallest_tau(run, method)
        lines.append(
            f"{name:20}{found['bits']:>6g}{size(found['sent']):>14}"
            f"{seconds(found['link_s']):>10}"
            f"{found['share']:>10.1%}{found['worth']:>8.2f}{tau:>13}"
            f"{seconds(found['run_s']):>14}{size(found['run_bytes']):>10}"
        )
    alone_s = seconds(run.max_steps * M * run.step_s)
    lines.append(f"{'one replica alone':50}{1:>10.1%}{1:>8.2f}{alone_s:>27}{size(0):>10}")
    lines.append(
        f"worth   {M} x computes, of methods in rounds x {kept:g}, because they need more steps\n"
        f"        to the same loss. In a small model rounds of {measured} (RESULTS.md);\n"
        "        others: --kept. Below 1 one replica alone is faster. (The last two columns are\n"
        "        those of equally many steps, with the warm-up.)"
    )
    edit = costs(run, "edit")
    if run.warmup_steps:
        alone_s = seconds(run.warmup_steps * M * run.step_s)
        lines.append(
            f"warm-up {run.warmup_steps:,} of these steps average gradients: "
            f"{seconds(edit['warmup_s'])}, and {size(edit['warmup_bytes'])} from each replica.\n"
            f"        On one replica alone: {alone_s}, and nothing is sent "
            "(docs/two_machines.md)"
        )
    step = costs(run, "minibatch")
    slowest_s = max(step["round_s"], run.step_s + edit["link_s"])
    lines.append(
        f"NCCL    give --timeout_s {math.ceil(2 * slowest_s)} or more: twice a step of warm-up, "
        "or a sync.\n        Its clock starts when the host issues an operation. (Default between "
        f"machines: {NCCL_TIMEOUT_S})"
    )
    alone, averaged = links_for_rounds(run)
    if alone < averaged:
        text = f"EDiT is worth more than one replica alone above {rate(alone)}"
        if averaged < math.inf:
            text += f",\n        and more than averaged gradients below {rate(averaged)}"
    else:
        text = "EDiT is nowhere worth more than both, averaged gradients and one replica alone"
    lines.append(f"link    {text}")
    return "\n".join(lines)


def size(count: float) -> str:
    if count >= 1e12:
        return f"{count / 1e12:.2f} TB"
    return f"{count / 1e6:.1f} MB" if count < 1e10 else f"{count / 1e9:.2f} GB"


def rate(mbps: float) -> str:
    return f"{mbps:.3g} Mbit/s" if mbps < 1000 else f"{mbps / 1000:.3g} Gbit/s"


def seconds(count: float) -> str:
    for unit, name in (86400, "days"), (3600, "h"), (60, "min"):
        if count >= 2 * unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g} s"
