"""A CUDA device for tests that is not there: memory of the host behind tensors that say cuda:0.

Data moves as late as CUDA allows. A collective reads its input in wait(). An asynchronous copy to
pinned memory is NaN until an event or the device is waited for. Every way in which the host waits
for the device is counted. Use it as a context manager, before train.py makes anything.
"""

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mesh import Group, Handle, Mesh

CUDA, CPU, aten = torch.device("cuda", 0), torch.device("cpu"), torch.ops.aten
LAZY = torch.device("lazy", 0)  # autograd runs it on the thread that calls backward
# Operators that return a host value, or whose result's shape depends on the values.
HOST_READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero}
INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class GpuTensor(torch.Tensor):
    """Memory of the host; the device cuda:0 for Python and `lazy` for the dispatcher."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    tolist = lambda self: self.cpu().tolist()

    @staticmethod
    def __new__(cls, host):
        return torch.Tensor._make_subclass(
            cls, host, dispatch_device=True, device_for_backend_keys=LAZY
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func}: outside of the Gpu context")


def is_cuda(device) -> bool:
    return isinstance(device, torch.device) and device.type in ("cuda", "lazy")


def each(function, values):
    """function(value) of all values in nested lists, tuples and dicts."""
    if isinstance(values, dict):
        return {name: each(function, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)([each(function, value) for value in values])
    return function(values)


def memory(x: GpuTensor) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    host = torch.empty(0, dtype=x.dtype)
    return host.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


class Gpu(TorchDispatchMode):
    """waits: what the host has waited for since it was last emptied."""

    def __init__(self):
        super().__init__()
        self.waits, self.pinned, self.copies, self.now, self.step = [], {}, [], 0, 0

    # ---- operators ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet, tensors = dict(kwargs or {}), func.overloadpacket, []
        if packet is torch.ops.prim.device:
            return LAZY
        each(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, [args, kwargs])
        here = [x for x in tensors if isinstance(x, GpuTensor)]
        device = kwargs.get("device") or (CUDA if here else CPU)  # of the result
        if packet is aten.copy_ and len(here) == 1:
            return self.copy(func, args, kwargs, to_gpu=here[0] is args[0])
        if packet is aten._to_copy and bool(here) != is_cuda(device):
            return self.copy(func, args, kwargs, to_gpu=not here)
        if packet in HOST_READS and here:
            self.waits.append(packet.__name__)
        if here and any(x.dim() for x in tensors if not isinstance(x, GpuTensor)):
            assert packet in INDEXING, f"{func}: a tensor of the host among those of the device"
            self.waits.append("index on the host")
        pin = kwargs.pop("pin_memory", False)
        out = self.run(func, args, kwargs, is_cuda(device))
        return self.pin(out) if pin else out

    def run(self, func, args, kwargs, on_gpu):
        """Compute on the memory. Results that are arguments (in place, out=) stay the same."""
        same = []  # pairs of a tensor and its memory

        def to_host(x):
            if isinstance(x, torch.Tensor):
                same.append((x, memory(x) if isinstance(x, GpuTensor) else x))
                return same[-1][1]
            return CPU if is_cuda(x) else x

        def wrap(x):
            if not isinstance(x, torch.Tensor):
                return x
            arguments = [argument for argument, host in same if host is x]
            return arguments[0] if arguments else GpuTensor(x) if on_gpu else x

        return each(wrap, func(*each(to_host, args), **each(to_host, kwargs)))

    # ---- copies between host and device ----

    def pin(self, x):
        self.pinned[x.untyped_storage().data_ptr()] = x  # keeps the memory
        return x

    def copy(self, func, args, kwargs, to_gpu):
        into = args[0] if func.overloadpacket is aten.copy_ else None
        source = args[0] if into is None else args[1]
        later = kwargs.get("non_blocking") or into is not None and args[2:3] == (True,)
        if later and into is None and not to_gpu:  # torch takes pinned memory for it
            into = self.pin(torch.empty(source.shape, dtype=kwargs.get("dtype", source.dtype)))
        host = source if to_gpu else into
        later = later and host.untyped_storage().data_ptr() in self.pinned
        if not later and source.dim() > 0:
            self.waits.append("copy to the device" if to_gpu else "copy to the host")
        if later and not to_gpu:
            self.copies.append((self.now, into, memory(source).clone()))
            self.now += 1
            return into.fill_(torch.nan)
        self.finish_copies(of=source if to_gpu else None)  # those of a stream are in order
        return self.run(func, args, kwargs, to_gpu)

    def finish_copies(self, until=math.inf, of=None):
        """Carry out the copies to the host that were issued before `until`, or into `of`."""
        place = of.untyped_storage().data_ptr() if of is not None else None
        left, self.copies = self.copies, []
        for time, to, value in left:
            if time < until and place in (None, to.untyped_storage().data_ptr()):
                to.copy_(value)
            else:
                self.copies.append((time, to, value))

    def wait(self, what, until=math.inf):
        self.waits.append(what)
        self.finish_copies(until)

    # ---- torch.cuda ----

    def __enter__(self):
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                pass

            def record(self):
                self.now, self.step = gpu.now, gpu.step

            def synchronize(self):
                gpu.wait(f"event of {gpu.step - self.step} steps before", self.now)

            def elapsed_time(self, end):
                return 1.0

        stream = SimpleNamespace(synchronize=lambda: gpu.wait("stream"))
        properties = SimpleNamespace(total_memory=10**10, uuid="0")
        cuda = {
            "Event": Event, "synchronize": lambda: gpu.wait("device"), "_lazy_init": lambda: None,
            "current_stream": lambda: stream, "is_available": lambda: True,
            "device_count": lambda: 1, "get_device_name": lambda: "none",
            "get_device_properties": lambda device: properties,
            "max_memory_allocated": lambda: 0,
        }  # fmt: skip
        self.patches = contextlib.ExitStack()
        for name, stand_in in cuda.items():
            self.patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        pin = lambda x: gpu.pin(x.clone())
        self.patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda")
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(False)
        self.patches.close()


# ---- rank 0 of a 2 x 2 mesh whose other ranks have the same data ----


class LateWork:
    """A collective that reads and writes in wait()."""

    def __init__(self, operation, group, tensors):
        self.operation, self.group, self.tensors = operation, group, tensors

    def wait(self):
        n, tensors = self.group.size, self.tensors
        if self.operation == "all-reduce":
            tensors[0].mul_(n)
        elif self.operation == "reduce-scatter":
            tensors[0].copy_(tensors[1].chunk(n)[0]).mul_(n)
        else:  # all-gather; all-to-all: the piece of each rank that is for rank 0
            for piece in tensors[0].chunk(n):
                own = tensors[1].view(-1) if self.operation == "all-gather" else tensors[1].chunk(n)[0]
                if piece.data_ptr() != own.data_ptr():
                    piece.copy_(own.view_as(piece))


class ImaginedMesh(Mesh):
    def __init__(self, device):
        super().__init__(1, device, alone=True)
        self.world_size, self.shards, self.replicas = 4, 2, 2
        self.timeouts = {"shard": self.timeout, "sync": self.timeout}
        self.shard, self.sync = self.make("shard", 0, 1), self.make("sync", 0, 2)

    def make(self, name, *ranks):
        set_timeout = lambda timeout: self.timeouts.update({name: timeout})
        return Group(name, list(ranks), 0, SimpleNamespace(set_timeout=set_timeout))

    def _issue(self, group, operation, function, *tensors, passes=1):
        work = LateWork(operation, group, tensors)
        if self.device.type == "cuda":
            return Handle([work], operation)
        work.wait()  # so a wait that is missing in the code changes a result on one device only
        return Handle()

    def send_receive(self, received, x, partner, group):
        received.copy_(x)
        return Handle()

    def all_gather_object(self, thing):
        return [thing] * 4
