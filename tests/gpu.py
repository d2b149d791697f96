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

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
LAZY = torch.device("lazy", 0)  # autograd runs it on the thread that calls backward
aten = torch.ops.aten
# Operators that return a host value, or whose result's shape depends on the values.
HOST_READS = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero}
INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}


class GpuTensor(torch.Tensor):
    """Memory of the host; the device cuda:0 for Python and `lazy` for the dispatcher."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return CUDA

    @property
    def is_cuda(self):
        return True

    def tolist(self):
        return self.cpu().tolist()

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


def tensors_in(values) -> list:
    """All tensors in nested lists, tuples and dicts."""
    found = []

    def look(value):
        if isinstance(value, torch.Tensor):
            found.append(value)

    each(look, values)
    return found


def memory(x: GpuTensor) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    host = torch.empty(0, dtype=x.dtype)
    return host.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


def address(x: torch.Tensor) -> int:
    """Of the storage: views of one memory have the same."""
    return x.untyped_storage().data_ptr()


class Gpu(TorchDispatchMode):
    """waits: what the host has waited for since it was last emptied."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.pinned = {}  # address -> tensor, which keeps the memory
        self.copies = []  # to the host, in flight: (time of issue, into, value)
        self.now = 0  # copies to the host so far
        self.step = 0  # of the training: the test sets it

    # ---- operators ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet is torch.ops.prim.device:
            return LAZY
        tensors = tensors_in([args, kwargs])
        here = [x for x in tensors if isinstance(x, GpuTensor)]
        device = kwargs.get("device")  # of the result
        on_gpu = is_cuda(device)
        if device is None:
            on_gpu = len(here) > 0

        if packet is aten.copy_ and len(here) == 1:
            return self.copy(func, args, kwargs, to_gpu=here[0] is args[0])
        if packet is aten._to_copy and on_gpu != (len(here) > 0):
            return self.copy(func, args, kwargs, to_gpu=on_gpu)
        self.note_waits(func, tensors, here)

        pin = kwargs.pop("pin_memory", False)
        out = self.run(func, args, kwargs, on_gpu)
        return self.pin(out) if pin else out

    def note_waits(self, func, tensors, here):
        """Does the operator read tensors of the device (`here`) on the host, or mix them with
        others? A scalar of the host may stand among them."""
        if not here:
            return
        if func.overloadpacket in HOST_READS:
            self.waits.append(func.overloadpacket.__name__)
        foreign = [x for x in tensors if not isinstance(x, GpuTensor)]
        if any(x.dim() > 0 for x in foreign):
            indexing = func.overloadpacket in INDEXING
            assert indexing, f"{func}: a tensor of the host among those of the device"
            self.waits.append("index on the host")

    def run(self, func, args, kwargs, on_gpu):
        """Compute on the memory. Results that are arguments (in place, out=) stay the same."""
        same = []  # pairs of a tensor and its memory

        def to_host(x):
            if is_cuda(x):
                return CPU
            if not isinstance(x, torch.Tensor):
                return x
            host = memory(x) if isinstance(x, GpuTensor) else x
            same.append((x, host))
            return host

        def wrap(x):
            if not isinstance(x, torch.Tensor):
                return x
            for argument, host in same:
                if host is x:
                    return argument
            return GpuTensor(x) if on_gpu else x

        out = func(*each(to_host, args), **each(to_host, kwargs))
        return each(wrap, out)

    # ---- copies between host and device ----

    def pin(self, x):
        self.pinned[address(x)] = x
        return x

    def copy(self, func, args, kwargs, to_gpu):
        """copy_(into, source, non_blocking) or _to_copy(source, ...)."""
        later = kwargs.get("non_blocking", False)
        if func.overloadpacket is aten.copy_:
            into, source = args[:2]
            later = later or args[2:3] == (True,)
        else:
            into = None
            source = args[0]
            if later and not to_gpu:  # torch takes pinned memory for it
                dtype = kwargs.get("dtype", source.dtype)
                into = self.pin(torch.empty(source.shape, dtype=dtype))
        host = source if to_gpu else into
        later = later and address(host) in self.pinned

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
        left = []
        for time, into, value in self.copies:
            asked_for = of is None or address(of) == address(into)
            if time < until and asked_for:
                into.copy_(value)
            else:
                left.append((time, into, value))
        self.copies = left

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
                self.now = gpu.now
                self.step = gpu.step

            def synchronize(self):
                gpu.wait(f"event of {gpu.step - self.step} steps before", self.now)

            def elapsed_time(self, end):
                return 1.0

        stream = SimpleNamespace(synchronize=lambda: gpu.wait("stream"))
        properties = SimpleNamespace(total_memory=10**10, uuid="0")
        cuda = {
            "Event": Event,
            "synchronize": lambda: gpu.wait("device"),
            "_lazy_init": lambda: None,
            "current_stream": lambda: stream,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda: "none",
            "get_device_properties": lambda device: properties,
            "max_memory_allocated": lambda: 0,
        }

        def pin_memory(x):
            return gpu.pin(x.clone())

        self.patches = contextlib.ExitStack()
        for name, stand_in in cuda.items():
            self.patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        self.patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin_memory))
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
        self.operation = operation
        self.group = group
        self.tensors = tensors

    def wait(self):
        n = self.group.size
        if self.operation == "all-reduce":
            self.tensors[0].mul_(n)
        elif self.operation == "reduce-scatter":
            part, whole = self.tensors
            part.copy_(whole.chunk(n)[0]).mul_(n)
        elif self.operation == "all-gather":
            whole, own = self.tensors
            self.fill(whole, own.view(-1))
        else:  # all-to-all: each rank's piece for rank 0
            received, pieces = self.tensors
            self.fill(received, pieces.chunk(n)[0])

    def fill(self, received, own):
        """Every rank has sent what rank 0 has."""
        for piece in received.chunk(self.group.size):
            if piece.data_ptr() != own.data_ptr():
                piece.copy_(own.view_as(piece))


class ImaginedMesh(Mesh):
    def __init__(self, device):
        super().__init__(1, device, alone=True)
        self.world_size = 4
        self.shards = 2
        self.replicas = 2
        self.shard_group = self.make("shard", [0, 1])
        self.sync_group = self.make("sync", [0, 2])

    def make(self, name, ranks):
        return Group(name, ranks, 0, None)

    def late(self, operation, group, *tensors):
        work = LateWork(operation, group, tensors)
        if self.device.type == "cuda":
            return Handle([work], operation)
        work.wait()  # so a wait that is missing in the code changes a result on one device only
        return Handle()

    def all_gather(self, whole, group):
        return self.late("all-gather", group, whole, group.own_piece(whole))

    def reduce_scatter(self, part, whole, group):
        return self.late("reduce-scatter", group, part, whole)

    def all_reduce(self, x, group):
        return self.late("all-reduce", group, x)

    def all_to_all(self, received, pieces, group):
        return self.late("all-to-all", group, received, pieces)

    def send_receive(self, received, x, partner, group):
        received.copy_(x)
        return Handle()

    def all_gather_object(self, thing):
        return [thing] * 4
