"""ZeRO-3 by hand: a layer's parameters are one flat vector, and each rank keeps 1/N of it.

Parameters, gradients and AdamW moments take 16 bytes per parameter. A layer is whole only while it
computes:

    forward   for each layer l:           all-gather l -> compute -> free
    backward  for each layer l, reversed: all-gather l -> compute -> reduce-scatter gradient -> free
    then      clip by global norm, AdamW on the shard (elementwise, so it needs no communication;
              optimizer.py)

The model is any list of layers (nn.Module). x = layer(x) for each; the last one also gets the
targets and returns the loss. model.py has the list that train.py trains, examples/own_layers.py
another one.

Both passes are loops over this list. Frameworks hang such code into autograd by hooks, because they
must take any model. A loop shows what happens when, and EDiT can step in between two layers. The
forward keeps each layer's input and output (the "tape"). The backward walks the tape from its end
and asks autograd for one layer's gradients at a time. The flat vector of a layer has P elements, a
multiple of 16 N:

    [ qkv | out | gate_up | down | norms | pad ]     rank n keeps elements [n P/N, (n+1) P/N)

    name         shape         dtype                 meaning
    master       (sum P/N,)    fp32                  parameters, this rank's shards of all layers
    grad         (sum P/N,)    fp32                  gradient, accumulated over micro-steps
    exp_avg      (sum P/N,)    fp32                  AdamW's first moment
    exp_avg_sq   (sum P/N,)    fp32                  its second one (with Muon only of what AdamW
                                                     steps)
    gathered[2]  (max P,)      compute (bf16, fp32)  two whole layers
    grad_buffer  (max P,)      fp32                  gradient of one layer, while reduced

Even layers are gathered into one permanent buffer (A) and odd layers into the other (B), and "free"
means that the next such layer overwrites it. For an embedding 0, blocks 1 and 2, and a head 3:

               forward                  backward
    computes   0   1   2   3            3   2   1   0
    buffer     A   B   A   B            B   A   B   (an embedding's backward needs no parameters)
    gathers    1   2   3                    1       (while it computes. 0 is gathered before the
                                                    forward; 3 and 2 are still there)

A layer's parameters are views of its buffer. Autograd saves these views. The backward gathers the
layer into the same buffer first, so they hold the right values again. So a micro-step gathers
2 L - 3 layers. The forward gathers all L. The backward gathers L - 3, because the last two are
still there, and an embedding's backward needs no parameters. (If that of layer 0 needs them, it
gathers L - 2.) Each forward forgets what the buffers hold, so whatever has changed
`master` since then (an inner step, a sync, a checkpoint), no layer is out of date. With N = 1 in
fp32 the parameters are views of `master`: no buffer, copy or collective.

While a layer computes, the next all-gather is in flight, and in the backward also the
reduce-scatter of layer l + 1. If gradients are averaged over replicas, too, the all-reduce of
a layer's gradient shard starts when its reduce-scatter has finished.

Source: ZeRO, arXiv 1910.02054.
Plain version: plain/replica.py, without shards.
"""

from collections import deque

import torch
from torch import nn
from torch.profiler import record_function

from config import UserError
from mesh import Handle
from model import check_layers, run_layer

ALIGNED = 16


class Layout:
    """Where a layer's parameters are in its flat vector: the same on every rank."""

    def __init__(self, layer: nn.Module, shards: int):
        # Matrices first: a shard has at most one border between what decays and what does not.
        parameters = sorted(layer.named_parameters(), key=lambda item: -item[1].dim())
        self.shapes = {name: parameter.shape for name, parameter in parameters}
        self.used = self.decayed = 0  # elements of all parameters, of matrices
        for shape in self.shapes.values():
            self.used += shape.numel()
            self.decayed += shape.numel() * (len(shape) > 1)
        self.shard_size = self.size_of_shard(shards)  # P/N
        self.padded = self.shard_size * shards  # P

    def border(self, element: int, shard: int) -> int:
        """The position of an element of the layer in a shard, limited to 0 .. P/N."""
        return min(max(element - shard * self.shard_size, 0), self.shard_size)

    def size_of_shard(self, shards: int) -> int:
        """A multiple of ALIGNED elements, so that every shard starts at a multiple of 32 bytes."""
        return -(-self.used // (shards * ALIGNED)) * ALIGNED

    def cut(self, flat: torch.Tensor) -> dict:
        """Views of a whole flat vector (P,) by parameter name."""
        views = {}
        first = 0
        for name, shape in self.shapes.items():
            views[name] = flat[first : first + shape.numel()].view(shape)
            first += shape.numel()
        return views


class Metrics:
    """Gradient norm, mean loss and sum of requests of one step. Equal in a shard group, and in all
    replicas if gradients are averaged. They are copied to the host without blocking it."""

    def __init__(self, scalars: torch.Tensor):
        self.norm = scalars[0]
        self.loss = scalars[1]
        self.event = None
        self.host = scalars.to("cpu", non_blocking=True)  # from a GPU: a copy in pinned memory
        if scalars.device.type == "cuda":
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list:
        """Waits for the copy on a GPU."""
        if self.event:
            self.event.synchronize()
        return self.host.tolist()


class ShardedModel:
    """A list of layers (nn.Modules) on this rank's shards: x = layer(x), one tensor each, and the
    last one returns the mean loss, layer(x, targets). Refused by name are frozen parameters, those
    that are no floats, those that two layers share, and buffers that would be saved
    (model.check_layers).

    A parameter that a forward does not use, as of an expert that no token has chosen, has gradient
    0. A layer may have a loss of its own, as for the balance of its experts: in each forward of the
    training it sets self.aux_loss, a scalar, which is added to the loss of the step. Layers that
    draw random numbers (dropout) use torch's default generator. Seed it differently on each rank
    when the layers have been made, as train.py does before each step; else all ranks draw the same.

    initialize(layer, l): sets the parameters of layer l, which are zeros before. The list may then
    be on `meta`, without memory. None: the layers have their values. Both ways they must be equal
    on all ranks, so seed the random numbers. dtype: what layers compute in; recompute: keep only an
    inner layer's input in the forward, compute the layer again in the backward (not for layers
    that draw random numbers, as dropout does).

    A first layer may say backward_needs_weights = False, as model.Embedding does: it is not
    gathered in the backward."""

    def __init__(self, layers, mesh, dtype=torch.float32, initialize=None, recompute=False):
        check_layers(layers)
        self.layers, self.mesh = list(layers), mesh
        self.dtype = dtype
        self.recompute = recompute
        needs_weights = getattr(self.layers[0], "backward_needs_weights", True)
        self.first_gathered = 0 if needs_weights else 1  # the backward gathers from here on
        self.layouts = [Layout(layer, mesh.shards) for layer in self.layers]
        count = sum(layout.shard_size for layout in self.layouts)
        master_dtype = torch.promote_types(dtype, torch.float32)
        # "Master" is the usual name of the fp32 parameters that the optimizer steps, beside copies
        # in a lower precision that the layers compute with.
        self.master = torch.zeros(count, dtype=master_dtype, device=mesh.device)  # (sum P/N,)
        self.grad = torch.zeros_like(self.master)
        self.masters = self.views(self.master)
        self.grads = self.views(self.grad)
        self._initialize(initialize)
        self._place_parameters()
        # EDiT sets it to its complete(l) at the end of a round. The next forward calls it before it
        # gathers layer l, and it puts the layer's new parameters into masters[l].
        self.pre_layer_hook = None
        # Starts the sum of layer l's gradient over the replicas. A method may replace it.
        # [sync] all-reduce, P/N fp32, once per layer and step (minibatch and warm-up only)
        self.sum_layer = lambda l: mesh.all_reduce(self.grads[l], mesh.sync_group)
        self.metrics_lag = 1 if mesh.device.type == "cuda" else 0  # steps, see known_metrics()
        self.metrics = deque(maxlen=1 + self.metrics_lag)
        # exp_avg_sq has layer l from this element on. Muon raises it (optimizer.py).
        self.squares_from = [0] * len(self.layers)

    def _initialize(self, initialize):
        """One layer at a time, in the same memory: with a list on `meta` no rank ever holds the
        whole model."""
        memory = torch.empty(max(layout.padded for layout in self.layouts))
        for l, (layer, layout) in enumerate(zip(self.layers, self.layouts)):
            whole = memory[: layout.padded].zero_()
            places = layout.cut(whole)
            if initialize:
                layer.load_state_dict(places, assign=True)
                initialize(layer, l)
            else:
                for name, place in places.items():
                    place.copy_(layer.get_parameter(name).detach())
            self.masters[l].copy_(self.mesh.shard_group.own_piece(whole))
            for parameter in layer.parameters():  # it gets its place below
                parameter.data = parameter.new_empty(0, dtype=self.dtype)
            layer.to(self.mesh.device)
        self._check_start()

    def _check_start(self):
        """Raise UserError if replicas start from different parameters. It compares the first one of
        each layer and shard, roughly, because processors may round differently."""
        if self.mesh.world_size == 1:
            return
        firsts = torch.stack([x[0] for x in self.masters]).tolist()
        # [start] all-gather of objects, all ranks, L numbers, once
        rows = self.mesh.all_gather_object(firsts)
        for rank, row in enumerate(rows):
            expected = torch.tensor(rows[rank % self.mesh.shards])
            if not torch.tensor(row).allclose(expected, rtol=1e-3, equal_nan=True):
                raise UserError(
                    f"replica {rank // self.mesh.shards} starts from other parameters than replica "
                    "0: seed the random numbers of the layers, the same on all ranks"
                )

    def _place_parameters(self):
        """Create the buffers and make every layer's parameters views of them."""
        one_shard = self.mesh.shards == 1
        self.aliased = one_shard and self.dtype == self.master.dtype  # gathering does nothing
        size = max(layout.padded for layout in self.layouts)
        self.gathered = []
        if not self.aliased:
            self.gathered = [self.master.new_empty(size, dtype=self.dtype) for _ in range(2)]
        if not one_shard:
            self.grad_buffer = self.master.new_empty(size)
        self.parameters = []  # of each layer, in the order of its layout
        for l, layer in enumerate(self.layers):
            buffer = self.masters[l] if self.aliased else self.gathered[l % 2]
            own = []
            # Autograd counts the writes into a tensor. It refuses a backward if a tensor that it
            # has saved was written since. Here other layers are written into the same buffer
            # between the forward and the backward, and that is right, because the backward gathers
            # the layer again first. A tensor made from .data has a counter of its own, which these
            # writes do not move.
            for name, place in self.layouts[l].cut(buffer.data).items():
                own.append(layer.get_parameter(name))
                own[-1].data = place
            self.parameters.append(own)

    def views(self, vector: torch.Tensor) -> list:
        """Cut a flat per-rank vector, laid out like `master`, into one (P/N,) view per layer."""
        return list(vector.split([layout.shard_size for layout in self.layouts]))

    def used_views(self, vector: torch.Tensor) -> list:
        """views() without the padding, which is 0 in every vector. Formats of 1 bit turn a 0 into
        another number, so they must leave the padding out."""
        found = []
        for layout, view in zip(self.layouts, self.views(vector)):
            found.append(view[: layout.border(layout.used, self.mesh.shard_index)])
        return found

    def sizes_from(self, firsts: list, shards: int, shard: int) -> list:
        """How many elements of each layer l from firsts[l] on are in shard number `shard`."""
        sizes = [layout.size_of_shard(shards) for layout in self.layouts]
        return [min(n, max(0, (shard + 1) * n - first)) for n, first in zip(sizes, firsts)]

    def norm(self, vector: torch.Tensor) -> torch.Tensor:
        """||vector|| over the whole replica, of a vector laid out like `master` or of one layer;
        0-dim. Gathers the squares and adds them in rank order, so equal replicas have equal norms,
        bit for bit."""
        square = vector.norm().square().view(1)
        # [shard] all-gather, 1 scalar per rank, when a method calls it
        return self.mesh.gather_rows(square, self.mesh.shard_group).sum().sqrt()

    def swap(self, vector: torch.Tensor):
        """Exchange the contents of `master` and of a vector laid out like it."""
        for x, other in zip(self.masters, self.views(vector)):
            kept = x.clone()  # one layer at a time: no second copy of the model
            x.copy_(other)
            other.copy_(kept)

    # ---- gathering ----

    def start_gather(self, l: int):
        """Start to fill layer l's buffer, unless that has begun or there is no such layer.
        handles[l % 2].wait() ends it, and returns at once if it has ended."""
        if self.aliased or not 0 <= l < len(self.layers) or self.gathered_layer[l % 2] == l:
            return
        whole = self.gathered[l % 2][: self.layouts[l].padded]
        self.mesh.shard_group.own_piece(whole).copy_(self.masters[l])  # casts to the compute dtype
        # [shard] all-gather, P in the compute dtype, both passes, once per layer and micro-step
        self.handles[l % 2] = self.mesh.all_gather(whole, self.mesh.shard_group)
        self.gathered_layer[l % 2] = l

    # ---- the two passes ----

    def forward(self, inputs, targets, train: bool = True):
        """Mean loss of a batch; of model.py's layers in nats per token, and inputs and targets are
        (B, T) int64. train: keep the tape for backward()."""
        # `master` may have changed since the last pass (inner step, sync, checkpoint), so what the
        # buffers hold is out of date.
        self.gathered_layer = [None, None]  # of each buffer
        self.handles = [Handle(), Handle()]
        self.tape = []  # (input, [output]) of each layer, until backward()
        x = inputs
        own_losses = []
        last = len(self.layers) - 1
        syncing = self.pre_layer_hook is not None  # EDiT, in the first forward of a round
        for l, layer in enumerate(self.layers):
            if layer.training != train:  # of interest for a dropout of your own
                layer.train(train)
            if syncing:
                with record_function(f"sync, layer {l}"):
                    self.pre_layer_hook(l)  # new parameters for layer l; it starts the gather, too
            self.start_gather(l)  # unless it was started while layer l - 1 computed
            self.handles[l % 2].wait()
            # Layer l + 1 is gathered while layer l computes. In a sync that would be too early: its
            # new parameters arrive in its own pre_layer_hook.
            if not syncing:
                self.start_gather(l + 1)
            recompute = self.recompute and 0 < l < last
            named = record_function(f"forward, layer {l}")
            with torch.set_grad_enabled(train and not recompute), named:
                # The tape is cut between layers, so that backward() can walk it layer by layer.
                x_in = x.detach().requires_grad_(train and l > 0)
                more = [targets] if l == last else []
                outputs = run_layer(layer, l, x_in, *more)
            x = outputs[0]
            if train:
                self.tape.append((x_in, None if recompute else outputs))
                own_losses += [loss.detach() for loss in outputs[1:]]
        return sum(own_losses, start=x.detach())

    def backward(self, scale: float, first: bool = True, sum_replicas: bool = False):
        """Add `scale` times the gradient of the last forward, summed over the shard group, to
        `grad` (first: replace it). sum_replicas: then sum `grad` over the sync group, too."""
        grad_x = torch.full_like(self.tape[-1][1][0], scale)  # of the loss
        reducing = None
        summing = []
        for l in reversed(range(len(self.layers))):
            if l >= self.first_gathered:  # the last two layers are still in the buffers
                self.start_gather(l)
                self.handles[l % 2].wait()
            if l > self.first_gathered:
                self.start_gather(l - 1)
            gradients, grad_x = self._backward_layer(l, grad_x, scale)
            if reducing:  # the reduce-scatter of layer l+1, which used the buffer during layer l
                summing.append(self._finish_reduce(*reducing, sum_replicas))
            reducing = (l, self._start_reduce(l, gradients, first))
            del gradients  # before autograd makes those of the next layer
        summing.append(self._finish_reduce(*reducing, sum_replicas))
        for handle in summing:
            handle.wait()

    def _backward_layer(self, l, grad_x, scale):
        """Take layer l off the tape. grad_x: d loss / d output, times scale. Returns the gradients
        of the parameters and d loss / d input (meaningless for layer 0)."""
        x_in, outputs = self.tape.pop()
        with record_function(f"backward, layer {l}"):
            if outputs is None:
                with torch.enable_grad():
                    outputs = run_layer(self.layers[l], l, x_in)
            inputs = list(self.parameters[l])
            if l > 0:
                inputs.append(x_in)
            grads = [grad_x]
            for own_loss in outputs[1:]:
                grads.append(torch.full_like(own_loss, scale))
            # What the forward has not used, as an expert without tokens, has gradient 0.
            gradients = torch.autograd.grad(
                outputs, inputs, grads, allow_unused=True, materialize_grads=True
            )
        return gradients[: len(self.parameters[l])], gradients[-1]

    def _start_reduce(self, l, gradients, first):
        """Start the sum of one layer's gradient over the shards into `grad`, in fp32."""
        layout, grad = self.layouts[l], self.grads[l]
        if self.mesh.shards == 1:
            put = torch._foreach_copy_ if first else torch._foreach_add_
            put(list(layout.cut(grad).values()), gradients)
            return Handle()
        whole = self.grad_buffer[: layout.padded]
        torch._foreach_copy_(list(layout.cut(whole).values()), gradients)
        whole[layout.used :].zero_()
        if not first:  # add the gradient so far to our slice, for the reduce-scatter to sum
            self.mesh.shard_group.own_piece(whole).add_(grad)
        # [shard] reduce-scatter, P fp32, backward, once per layer and micro-step
        return self.mesh.reduce_scatter(grad, whole, self.mesh.shard_group)

    def _finish_reduce(self, l, handle, sum_replicas):
        handle.wait()
        return self.sum_layer(l) if sum_replicas else handle

    # ---- the end of a step ----

    def step_metrics(self, loss: torch.Tensor, request: float, averaged: bool) -> Metrics:
        """Sum what the ranks know of this step: all ranks if gradients were averaged, else those of
        the shard group. loss: this rank's mean; request: above 0 if this rank asks for something,
        see train.py."""
        ranks = self.mesh.world_size if averaged else self.mesh.shards
        # After averaging, all M replicas have the same gradient, so each counts for 1/M of it.
        square = self.grad.norm() ** 2 * self.mesh.shards / ranks
        scalars = torch.stack([square, loss / ranks, torch.full_like(loss, request)])
        scalars = scalars.to(self.grad.dtype)
        if averaged:
            # [sync] sum over all ranks, 3 scalars, once per step
            scalars = self.mesh.sum_over_ranks(scalars)
        else:
            # [shard] all-reduce, 3 scalars, once per step
            self.mesh.all_reduce(scalars, self.mesh.shard_group).wait()
        scalars[0].sqrt_()
        self.metrics.append(Metrics(scalars))
        return self.metrics[-1]

    def known_metrics(self) -> list:
        """[norm, loss, sum of requests] of the last step; on a GPU of the last but one, so that the
        host waits only for that one. The same on all ranks of a replica."""
        return self.metrics[0].read()

    def clip_gradient(self, max_norm: float):
        """Scale `grad` to a norm of at most max_norm (0: any), with the norm of step_metrics(). If
        it is not finite, set `grad` to 0: AdamW's moments stay finite."""
        norm = self.metrics[-1].norm
        factor = norm.isfinite().to(norm.dtype)
        if max_norm:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 0.0)
        if self.mesh.device.type == "cpu" and factor == 1:  # reading it is free, a pass is not
            return
        self.grad.mul_(factor)
        self.grad.nan_to_num_(0.0, 0.0, 0.0)  # 0 * NaN is NaN
