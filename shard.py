"""ZeRO-3 by hand: a layer's parameters are one flat vector, and each rank keeps 1/N of it.

The problem. Parameters, gradients and AdamW moments take 16 bytes per parameter, on every rank, if
each holds the whole model. With N shards a rank keeps 1/N of all of them, and a layer is whole only
while it computes:

    forward   for each layer l:           all-gather l -> compute -> free
    backward  for each layer l, reversed: all-gather l -> compute -> reduce-scatter gradient -> free
    then      clip by global norm, AdamW on the shard (elementwise, so a shard needs no neighbour)

Method. No autograd hook, no wrapper: the model is a list of layers, and both passes are plain loops
over it. The forward keeps each layer's input and output (the "tape"); the backward walks the tape
from its end and asks autograd for one layer's gradients at a time.

A layer's flat vector, P elements (padded to a multiple of N), matrices before norm gains:

    [ qkv | out | gate_up | down | norms | pad ]     rank n keeps elements [n P/N, (n+1) P/N)

`master`, `grad`, AdamW's moments (and whatever a method adds: anchor, momentum) are single flat
vectors per rank that hold the shards of all layers one behind the other; `views(vector)` cuts them
back into layers. Optimizer, gradient norm and DiLoCo's exchange are therefore one pass over one
vector, and a checkpoint is a handful of them.

Whole layers live in two buffers for good: even layers in one, odd layers in the other, so at most
two are ever whole, the one computing and the one being prefetched. A layer's parameters are views
of its buffer, created once. "Free" is letting the next-but-one layer overwrite it. The tensors that
autograd saves for the backward are the same views: they see the right values again when the
backward has gathered the layer a second time into the same place. `held` knows which layer a buffer
has, so the two layers that the forward gathered last are not gathered again when the backward
starts with them, and the embedding's backward needs no parameters at all: a step gathers 2 L - 3
layers, not 2 L.

With N = 1 in fp32 the parameters are views of `master` itself: no buffer, no copy, no collective.

Overlap. While layer l computes, the next one's all-gather is in flight, and in the backward also
the previous one's reduce-scatter. When gradients are averaged over replicas too (mini-batch,
warm-up), the all-reduce of layer l+1's shard is issued as soon as its reduce-scatter has arrived,
one layer later, and waited for at the end of the backward (in an outbox: one layer later).

    name         shape         dtype                 what
    master       (sum P/N,)    fp32                  parameters, this rank's shard
    grad         (sum P/N,)    fp32                  their gradient, accumulated over micro-steps
    exp_avg, exp_avg_sq        fp32                  AdamW's moments, laid out alike
    whole[2]     (max P,)      compute (bf16, fp32)  two gathered layers
    outgoing[2]  (max P,)      fp32                  a layer's gradient in the making and one on its
                                                     way (the same memory if an outbox takes a copy,
                                                     see outbox.py)

Gradients are summed in fp32 even when the layers compute in bf16. The backward of a matrix product
writes them to their place in `outgoing` (with N = 1: in `grad`) itself, see model.Linear.

Recomputing (`recompute`): the forward keeps a block's input only, the backward computes the block
again, with the parameters that it has gathered anyway. Activations then take one block's memory and
the blocks' inputs; a step takes a third more arithmetic.

Source: ZeRO, arXiv 1910.02054.
"""

import ctypes
import sys
from collections import deque

import torch
from torch import nn
from torch.profiler import record_function

from mesh import Handle
from model import ModelConfig, build_layer


class Layout:
    """Where a layer's parameters stand in its flat vector: the same on every rank."""

    def __init__(self, layer: nn.Module, shards: int):
        # Matrices first, so that a shard has at most one border between what decays and
        # what does not.
        self.parameters = sorted(layer.named_parameters(), key=lambda item: -item[1].dim())
        self.shapes = {name: parameter.shape for name, parameter in self.parameters}
        self.used = sum(shape.numel() for shape in self.shapes.values())
        self.decayed = sum(shape.numel() for shape in self.shapes.values() if len(shape) > 1)
        self.piece = -(-self.used // shards)  # P/N, rounded up, as torch.chunk and DTensor do
        self.padded = self.piece * shards  # P

    def cut(self, flat: torch.Tensor) -> dict:
        """Views of a whole flat vector (P,) by parameter name."""
        pieces = flat[: self.used].split([shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), pieces)
        return {name: piece.view(shape) for (name, shape), piece in named}


class ShardedModel:
    """The layers of `model.py` on this rank's shards. `dtype` is what
    layers compute and gather in."""

    def __init__(
        self,
        config: ModelConfig,
        mesh,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        recompute: bool = False,
    ):
        self.config, self.mesh, self.dtype, self.recompute = config, mesh, dtype, recompute
        self.layers, self.layouts, pieces = [], [], []
        for l in range(config.n_layer + 2):  # one at a time: no rank ever builds the whole model
            layer = build_layer(config, l, seed).to(mesh.device)
            layout = Layout(layer, mesh.shards)
            pieces.append(self._own_piece(layout))
            self.layers.append(layer)
            self.layouts.append(layout)
        self.n_params = sum(layout.used for layout in self.layouts)
        self.master = torch.cat(pieces)  # (sum P/N,)
        self.grad = torch.zeros_like(self.master)
        self.masters, self.grads = self.views(self.master), self.views(self.grad)
        self._place_parameters()
        self.tape = []  # (input, output) of each layer, from forward to backward
        # EDiT, while a sync is under way: called with l before layer l is gathered
        self.sync_layer = None
        # What a rank may tell its shard group at the end of each step, summed up there:
        # A-EDiT's clock, a signal
        self.vote = self.asked_to_stop = lambda: 0.0
        self.shared = deque(maxlen=2)  # [norm, mean loss, votes, stops] of the last two steps
        self.read_late = 1 if mesh.device.type == "cuda" else 0  # steps, see news()

    def _own_piece(self, layout):
        """Copy this rank's share of a freshly initialised layer, in the master's dtype,
        and free the layer."""
        # fp32, or fp64 when a test computes in it
        master = torch.promote_types(self.dtype, torch.float32)
        whole = torch.zeros(layout.padded, dtype=master, device=self.mesh.device)
        for (_, parameter), place in zip(layout.parameters, layout.cut(whole).values()):
            place.copy_(parameter.detach())
            parameter.data = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
        return whole.chunk(self.mesh.shards)[self.mesh.shard_index].clone()

    def _place_parameters(self):
        """Point every layer's parameters at the memory that they will be in whenever the layer
        computes, and their gradients at where they are wanted."""
        alone = self.mesh.shards == 1
        self.aliased = alone and self.dtype == self.master.dtype  # gathering is a no-op
        size = max(layout.padded for layout in self.layouts)
        make = lambda dtype: torch.empty(size, dtype=dtype, device=self.mesh.device)
        self.whole = [] if self.aliased else [make(self.dtype), make(self.dtype)]
        self.mesh.share_memory(size * self.dtype.itemsize, size * self.master.itemsize)
        self.outgoing = []
        if not alone:
            making = make(self.master.dtype)
            # An outbox takes a copy; without it, one layer's gradient may still be on its way.
            copied = self.mesh.outbox(self.mesh.shard, "reduce-scatter", making.nbytes)
            self.outgoing = [making, making if copied else make(self.master.dtype)]
        for l, (layer, master) in enumerate(zip(self.layers, self.masters)):
            home = master if self.aliased else self.whole[l % 2]
            # .data: an alias with a version counter of its own. Autograd must not take a
            # refilled buffer for a modified one: by the time it looks, the buffer has the
            # values it had in the forward.
            for name, place in self.layouts[l].cut(home.data).items():
                layer.get_parameter(name).data = place
            gradient = self.grads[l] if alone else self.outgoing[l % 2]
            for name, place in self.layouts[l].cut(gradient).items():
                layer.get_parameter(name).main_grad = place
        self.parameters = [[p for _, p in layout.parameters] for layout in self.layouts]
        self.forget_gathered()

    def views(self, vector: torch.Tensor) -> list:
        """Cut a flat per-rank vector, laid out like `master`, into one (P/N,) view per layer."""
        return list(vector.split([layout.piece for layout in self.layouts]))

    def outer_vector(self, offload: bool) -> torch.Tensor:
        """Zeros laid out like `master`, for what a method keeps between syncs.
        offload: in (pinned) host memory."""
        if not offload or self.mesh.device.type == "cpu":
            return torch.zeros_like(self.master)
        return torch.zeros(self.master.shape, dtype=self.master.dtype, pin_memory=True)

    def buffers(self) -> list:
        """The memory that whole layers pass through."""
        return [*self.whole, *dict.fromkeys(self.outgoing)]

    # ---- gathering ----

    def forget_gathered(self):
        """The masters have changed: what the buffers hold is out of date."""
        self.held, self.arriving = [None, None], [None, None]

    def start_gather(self, l: int):
        """Begin to fill layer l's buffer, unless it is there or there is no such layer."""
        if self.aliased or not 0 <= l < len(self.layers) or self.held[l % 2] == l:
            return
        whole = self.whole[l % 2][: self.layouts[l].padded]
        shards = whole.chunk(self.mesh.shards)
        shards[self.mesh.shard_index].copy_(self.masters[l])  # casts to the compute dtype
        # [shard] all-gather, P in the compute dtype, both passes, once per layer and micro-step
        self.arriving[l % 2] = self.mesh.all_gather(whole, self.mesh.shard)
        self.held[l % 2] = l

    def finish_gather(self, l: int):
        self.start_gather(l)
        if self.arriving[l % 2]:
            self.arriving[l % 2].wait()
            self.arriving[l % 2] = None

    # ---- the two passes ----

    def forward(self, tokens, targets, train: bool = True):
        """Loss (mean, nats per token) of a batch, (B, T) int64 each.
        train: keep the tape for backward()."""
        x, last, syncing = tokens, len(self.layers) - 1, self.sync_layer is not None
        for l, layer in enumerate(self.layers):
            if syncing:  # layer l's parameters are final only now, so nothing is prefetched
                with record_function(f"sync, layer {l}"):
                    self.sync_layer(l)
            self.finish_gather(l)
            if not syncing:
                self.start_gather(l + 1)
            again = self.recompute and 0 < l < last  # in the backward
            named = record_function(f"forward, layer {l}")
            with torch.set_grad_enabled(train and not again), named:
                x_in = x.detach().requires_grad_(train and l > 0)
                x = layer(x_in, targets) if l == last else layer(x_in)
            if train:
                self.tape.append((x_in, None if again else x))
        return x.detach()

    def backward(self, scale: float, first: bool = True, average_replicas: bool = False):
        """Add `scale` times the gradient of the last forward, summed over the shard group, to
        `grad` (first: replace it). average_replicas: then sum `grad` over the sync group too."""
        grad_x = torch.full((), scale, dtype=self.tape[-1][1].dtype, device=self.mesh.device)
        leaving, averaging = None, []
        for l in reversed(range(len(self.layers))):
            if self.layers[l].backward_reads_parameters:
                self.finish_gather(l)
            if l > 0 and self.layers[l - 1].backward_reads_parameters:
                self.start_gather(l - 1)
            grad_x = self._backward_layer(l, grad_x, first)
            if leaving:
                averaging.append(self._settle(*leaving, average_replicas))
            # An outbox's slots are few.
            if self.mesh.outbox(self.mesh.sync, "all-reduce") and len(averaging) > 1:
                averaging.pop(0).wait()
            leaving = (l, self._start_reduce(l, first))
        averaging.append(self._settle(*leaving, average_replicas))
        for handle in averaging:
            handle.wait()

    def _backward_layer(self, l, grad_x, first):
        """Take layer l's entry off the tape; its parameters' gradients come to their main_grad.
        grad_x: d loss / d output; returns d loss / d input (nothing sensible for the embedding)."""
        x_in, x = self.tape.pop()
        parameters, adds = self.parameters[l], self.mesh.shards == 1 and not first
        for parameter in parameters:
            parameter.adds = adds
        with record_function(f"backward, layer {l}"):
            if x is None:
                with torch.enable_grad():
                    x = self.layers[l](x_in)
            inputs = parameters + ([x_in] if l > 0 else [])
            gradients = torch.autograd.grad(x, inputs, grad_x, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients):
                if gradient is None:  # it is in its place already
                    continue
                place = parameter.main_grad
                place.add_(gradient) if adds else place.copy_(gradient)
        return gradients[-1]

    def _start_reduce(self, l, first):
        """Send one layer's gradient, which is in `outgoing`, on its way."""
        if self.mesh.shards == 1:
            return Handle()
        layout, grad = self.layouts[l], self.grads[l]
        whole = self.outgoing[l % 2][: layout.padded]
        whole[layout.used :].zero_()
        # What earlier micro-steps left here rides along: the sum needs no other buffer.
        if not first:
            whole.chunk(self.mesh.shards)[self.mesh.shard_index].add_(grad)
        # [shard] reduce-scatter, P fp32, backward, once per layer and micro-step
        return self.mesh.reduce_scatter(grad, whole, self.mesh.shard)

    def _settle(self, l, handle, average_replicas):
        handle.wait()
        if not average_replicas:
            return handle
        # [sync] all-reduce, P/N fp32, once per layer and step (mini-batch and warm-up only)
        return self.mesh.all_reduce(self.grads[l], self.mesh.sync)

    # ---- around the step ----

    def clip_gradient(self, max_norm: float, loss: torch.Tensor):
        """Scale `grad` so that its norm over all shards is at most max_norm (0: any), and zero it
        if the norm is not finite: AdamW's moments would stay NaN for good, also when the parameters
        have been mended. The loss and what else the ranks of a replica have to tell each other
        share the norm's trip."""
        told = [torch.full_like(loss, said) for said in (self.vote(), self.asked_to_stop())]
        shared = torch.stack([self.grad.norm() ** 2, loss / self.mesh.shards, *told])
        shared = shared.to(self.grad.dtype)
        # [shard] all-reduce, 4 scalars, once per step
        self.mesh.all_reduce(shared, self.mesh.shard).wait()
        norm = shared[0].sqrt_()
        self.shared.append(Arriving(shared))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        factor = factor.where(norm.isfinite(), 0.0)
        if self.mesh.device.type == "cpu" and factor == 1:  # a look costs nothing here, a pass does
            return
        # Not finite: times 0 all is 0 or NaN, and then 0. One pass each, where masked_fill_ takes
        # as long as five.
        self.grad.mul_(factor)
        self.grad.nan_to_num_(0.0, 0.0, 0.0)

    def news(self) -> list:
        """[gradient norm, mean loss, votes, stops] without waiting for the device:
        of the last step on the CPU, of the one before on CUDA, which has long
        arrived. The same on all ranks of a replica."""
        return self.shared[-1 - self.read_late if len(self.shared) > self.read_late else -1].read()

    def adamw(self, weight_decay: float, **options) -> torch.optim.AdamW:
        """The inner optimizer, on this rank's shards. Its moments are flat vectors, too, of which
        the optimizer's state holds views."""
        optimizer = torch.optim.AdamW(self.optimizer_groups(weight_decay), fused=True, **options)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                first = parameter.storage_offset()
                place = slice(first, first + parameter.numel())
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self.mesh.device),
                    "exp_avg": self.exp_avg[place],
                    "exp_avg_sq": self.exp_avg_sq[place],
                }
        return optimizer

    def optimizer_groups(self, weight_decay: float) -> list:
        """AdamW's parameter groups over views of `master`, with `.grad` views of `grad`: matrices
        decay, norm gains do not."""
        decayed, plain = [], []
        for layout, master, grad in zip(self.layouts, self.masters, self.grads):
            border = layout.decayed - self.mesh.shard_index * layout.piece
            border = min(max(border, 0), layout.piece)
            for part, group in ((slice(0, border), decayed), (slice(border, None), plain)):
                if master[part].numel():
                    parameter = nn.Parameter(master[part])
                    parameter.grad = grad[part]
                    group.append(parameter)
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def state_dict(self) -> dict | None:
        """The whole model in fp32 on the CPU of rank 0, gathered layer by layer (None on other
        ranks). All ranks of replica 0 must call it; names are those of model.Llama."""
        state = {}
        for l, (layout, master) in enumerate(zip(self.layouts, self.masters)):
            whole = master.new_empty(layout.padded)
            whole.chunk(self.mesh.shards)[self.mesh.shard_index].copy_(master)
            # [shard] all-gather, P fp32, once per call and layer
            self.mesh.all_gather(whole, self.mesh.shard).wait()
            if self.mesh.rank == 0:
                for name, value in layout.cut(whole).items():
                    state[f"layers.{l}.{name}"] = value.to("cpu", torch.float32, copy=True)
        return state if self.mesh.rank == 0 else None


def keep_freed_memory():
    """Let glibc keep what a step frees for the next one. It would give much of it back to the
    system, and fetch it again page by page: some 3% of a step on the CPU."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, bytes: older versions take no more
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class Arriving:
    """A few scalars on their way from the device to the host, without holding up either."""

    def __init__(self, scalars: torch.Tensor):
        self.event, self.host = None, scalars
        if scalars.device.type == "cuda":
            self.host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            self.host.copy_(scalars, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list:
        if self.event:
            self.event.synchronize()
        return self.host.tolist()
