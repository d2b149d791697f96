"""The grid and its collectives; which backend each group uses. all_to_all and
send_receive are in test_methods.py and test_relatives.py."""

import contextlib
import os
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mesh as mesh_module
from config import UserError
from mesh import Group, Handle, Mesh, RankLostError, translate_comm_errors
from plumbing import launch, simulate
from ranks import run_ranks
from rows import each_row

CPU = torch.device("cpu")
ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


# ---- collectives, on four ranks ----


def odd_numbers(rank):
    """Their sum depends on the order."""
    return torch.randn(40, generator=torch.Generator().manual_seed(rank))


def use_group(mesh, group):
    """What each collective returns in this group."""
    n = group.size
    first = 3 * group.index
    whole = torch.full((3 * n,), -1.0)
    whole[first : first + 3] = mesh.rank
    mesh.all_gather(whole, group).wait()

    full = torch.arange(3.0 * n) * (mesh.rank + 1)
    part = torch.empty(3) if n > 1 else full  # alone an operation does nothing
    mesh.reduce_scatter(part, full, group).wait()

    total = torch.tensor([float(mesh.rank)])
    mesh.all_reduce(total, group).wait()

    rows = mesh.gather_rows(torch.tensor([float(mesh.rank), 7.0]), group)
    return {
        "size": n,
        "all_gather": whole.tolist(),
        "reduce_scatter": part.tolist(),
        "all_reduce": total.item(),
        "gather_rows": rows.tolist(),
    }


def collectives(shards, backend):
    """Results, and what the mesh has counted."""
    mesh = Mesh(shards, CPU, 60, lambda ranks, crosses_replicas: backend)
    shard = use_group(mesh, mesh.shard_group)
    sync = use_group(mesh, mesh.sync_group)
    ranks = mesh.all_gather_object({"rank": mesh.rank})
    total = mesh.sum_over_ranks(odd_numbers(mesh.rank)).tolist()

    sent = dict(mesh.sent)
    waited_s = dict(mesh.waited_s)
    calls = dict(mesh.calls)
    with mesh.uncounted():
        mesh.all_reduce(odd_numbers(0), mesh.sync_group).wait()
    assert mesh.sent == sent
    assert mesh.waited_s == waited_s
    return SimpleNamespace(
        shard=shard, sync=sync, ranks=ranks, total=total, sent=sent, waited_s=waited_s, calls=calls
    )


MESHES = [
    (1, "gloo"),
    (1, "shm"),
    (2, "gloo"),
    (2, "shm"),
    (4, "gloo"),
    (4, "shm"),
]


def all_meshes():
    return [collectives(shards, backend) for shards, backend in MESHES]


@pytest.fixture(scope="module")
def found():
    """By mesh what collectives() returns on each of four ranks."""
    ranks = run_ranks(4, all_meshes)
    return dict(zip(MESHES, zip(*ranks)))


def groups_of(rank, shards):
    """Name -> ranks of the groups of this rank."""
    replica, shard = divmod(rank, shards)
    replicas = 4 // shards
    return {
        "shard": [replica * shards + k for k in range(shards)],
        "sync": [k * shards + shard for k in range(replicas)],
    }


@each_row("shards, backend", MESHES)
def test_collectives_in_a_group_compute_what_they_promise(shards, backend, found):
    for rank, result in enumerate(found[shards, backend]):
        for name, ranks in groups_of(rank, shards).items():
            own = ranks.index(rank)
            weight = rank + 1
            if len(ranks) > 1:
                weight = sum(r + 1 for r in ranks)
            gathered = []
            for r in ranks:
                gathered += 3 * [float(r)]
            assert getattr(result, name) == {
                "size": len(ranks),
                "all_gather": gathered,
                "reduce_scatter": [weight * float(3 * own + k) for k in range(3)],
                "all_reduce": sum(ranks),
                "gather_rows": [[float(r), 7.0] for r in ranks],
            }


@each_row("shards, backend", MESHES)
def test_all_ranks_get_the_same_sum_and_all_objects(shards, backend, found):
    in_rank_order = odd_numbers(0)
    for rank in 1, 2, 3:
        in_rank_order = in_rank_order + odd_numbers(rank)
    results = found[shards, backend]
    for result in results:
        assert result.ranks == [{"rank": r} for r in range(4)]
        assert result.total == results[0].total  # to the last bit
        assert result.total == pytest.approx(in_rank_order.tolist(), rel=1e-5)
        if shards == 2:
            assert result.total == in_rank_order.tolist()


# sum_over_ranks() of 40 numbers: an all-reduce in one group of 4, or two all-gathers
BYTES_OF_A_SUM = {
    1: {"shard": 0, "sync": 2 * 3 / 4 * 160},
    2: {"shard": 160, "sync": 2 * 160},
    4: {"shard": 2 * 3 / 4 * 160, "sync": 0},
}


@each_row("shards, backend", MESHES)
def test_mesh_counts_the_bytes_calls_and_waits_it_promises(shards, backend, found):
    sizes = {"shard": shards, "sync": 4 // shards}
    in_sum = BYTES_OF_A_SUM[shards]

    for result in found[shards, backend]:
        assert {call.split()[0] for call in result.calls} <= {"shard", "sync"}
        for name, size in sizes.items():
            wholes = 2 * 12 * size  # all-gather, reduce-scatter
            scalar = 2 * 4  # all-reduce
            rows = 8 * size  # gather_rows
            promised = (size - 1) / size * (wholes + scalar + rows)
            assert result.sent[name] == pytest.approx(promised + in_sum[name])
            if size == 1:
                assert not any(call.startswith(name) for call in result.calls)
        assert (result.waited_s["others"] > 0) == (shards < 4)
        assert result.waited_s["link"] == 0


# ---- waits, links, errors, on one rank ----


def test_waits_for_a_simulated_link_and_for_others_are_told_apart(monkeypatch):
    now_s = 100.0

    def wait():
        nonlocal now_s
        now_s += 0.75

    monkeypatch.setattr(mesh_module, "time", SimpleNamespace(perf_counter=lambda: now_s))
    mesh = Mesh(1, CPU, alone=True)
    mesh.spans = []
    work = SimpleNamespace(link_s=0.5, wait=wait)
    handle = Handle([work], "", mesh)
    handle.wait()
    handle.wait()  # it has ended: each layer of a fragment waits for the same one
    assert mesh.waited_s == {"others": 0.25, "link": 0.5}
    assert mesh.spans == [  # for --timeline
        ("wait for others", 100.0, 100.25),
        ("wait for link", 100.25, 100.75),
    ]

    # shm may wait for a free slot when an operation starts: between replicas that counts.
    with mesh._collective(mesh.shard_group, "", 0):
        wait()
    assert mesh.waited_s["others"] == 0.25
    with mesh._collective(mesh.sync_group, "", 0):
        wait()
    assert mesh.waited_s["others"] == 1.0


@each_row("more", ["", ". This may mean that a process has died"])
def test_lost_rank_is_reported_in_one_line_without_torchs_stack_and_files(more):
    text = f"[/pytorch/gloo/pair.cc:598] Connection closed{more}\nException raised from pair.cc"
    with pytest.raises(RankLostError) as error, translate_comm_errors():
        raise RuntimeError(text)
    line = "lost contact with another rank (Connection closed); --resume auto"
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@each_row("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_fault_of_this_ranks_gpu_is_no_lost_rank(error):
    with pytest.raises(error), translate_comm_errors():
        raise error("x")


@each_row("text", [
    "ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (2), got (5))",
    "[rank0]:[F1129 ProcessGroupGloo.cpp:1537] Check failed: outputShape[0] == inputShape[0]",
])  # fmt: skip
def test_wrong_argument_is_no_lost_rank(text):
    with pytest.raises(RuntimeError, match=re.escape(text)), translate_comm_errors():
        raise RuntimeError(text)


def test_link_carries_what_crosses_replicas_with_its_bytes(monkeypatch):
    """Four replicas of two shards; 48 bytes."""
    for name in "all_reduce", "all_to_all_single", "P2POp", "batch_isend_irecv":
        monkeypatch.setattr(dist, name, lambda *args, **options: None)
    monkeypatch.setattr(mesh_module, "all_gather_single", lambda *args, **options: None)
    carried = []

    def carry(works, sent_bytes):
        carried.append(sent_bytes)

    mesh = Mesh(1, CPU, alone=True)
    mesh.replicas = 4
    mesh.link = SimpleNamespace(carry=carry)
    mesh.shard_group = Group("shard", [0, 1], 0, None)
    mesh.sync_group = Group("sync", [0, 2, 4, 6], 0, None)
    x = torch.zeros(6, dtype=torch.float64)
    mesh.all_reduce(x, mesh.shard_group)
    assert carried == []

    mesh.all_reduce(x, mesh.sync_group)
    mesh.all_gather(x, mesh.sync_group)
    mesh.all_to_all(x, x, mesh.sync_group)
    mesh.send_receive(x, x, 1, mesh.sync_group)
    assert carried == [72, 36, 36, 48]


# ---- backends ----


def replace_functions(monkeypatch, module, **results):
    """Each function `name` of the module returns results[name]."""
    for name, result in results.items():
        monkeypatch.setattr(module, name, lambda *args, result=result, **options: result)


def groups_made(monkeypatch, backend, machines="aabb"):
    """Arguments of dist.new_group() on rank 0 of 2 x 2, and the mesh."""
    made = []
    replace_functions(monkeypatch, dist, is_initialized=True, get_world_size=4, get_rank=0)
    replace_functions(monkeypatch, dist, get_backend=backend, all_reduce=None)
    monkeypatch.setattr(dist, "new_group", lambda *args: made.append(args))
    several = lambda ranks: len({machines[r] for r in ranks}) > 1
    mesh = Mesh(2, CPU, 7, lambda ranks, crosses_replicas: backend, few_sms=several)
    ranks = [args[0] for args in made]
    assert ranks == [[0, 1], [2, 3], [0, 2], [1, 3]]  # no third communicator
    for args in made:
        assert args[1:3] == (timedelta(seconds=7), backend)
    return made, mesh


@each_row("machines, limited", [("aabb", True), ("aaaa", False)])
def test_nccl_takes_few_sms_between_machines_and_has_no_third_communicator(
    monkeypatch, machines, limited
):
    if not dist.is_nccl_available():  # else torch's own options
        new_options = lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=-1))
        nccl = SimpleNamespace(Options=new_options)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    made, mesh = groups_made(monkeypatch, "nccl", machines)
    unlimited = dist.ProcessGroupNCCL.Options().config.max_ctas
    for group, (_, _, _, options) in zip("shard shard sync sync".split(), made):
        few = limited and group == "sync"
        assert options.config.max_ctas == (4 if few else unlimited)
        assert options.is_high_priority_stream == (group == "shard")
        assert options._timeout == timedelta(seconds=7)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
def test_torch_knows_the_options_of_nccl_that_we_set():
    """A typing error or a new name in torch would make a new attribute."""
    fresh = dist.ProcessGroupNCCL.Options()
    assert hasattr(fresh.config, "max_ctas")
    for name in "is_high_priority_stream", "_timeout":
        assert hasattr(fresh, name)
    mesh = Mesh(1, CPU, few_sms=lambda ranks: True)
    options = mesh._nccl_options([0, 1], crosses_replicas=True)
    assert options.config.max_ctas == 4 and not options.is_high_priority_stream
    assert mesh._nccl_options([0, 1], crosses_replicas=False).is_high_priority_stream


def launch_flags(device, backend):
    config = SimpleNamespace(device=device, backend=backend, dtype="fp32")
    config.dry_run = False
    config.shards = 1
    config.timeout_s = 1.0
    config.link_mbps = 0
    config.timeline = False
    return config


@each_row(
    "backend, link_mbps, barrier, machines, expected",
    [
        # rank 0 .. 3 on machine a or b
        ("auto", 0, True, "aabb", ["shm", "shm", "gloo"]),
        ("auto", 9, True, "aaaa", ["shm", "gloo", "gloo"]),
        ("auto", 0, False, "aaaa", ["shm", "gloo", "gloo"]),
        ("auto", 0, True, [""] * 4, ["gloo"] * 3),  # shm does not run on these machines
        ("shm", 0, True, "aaaa", ["shm"] * 3),
        ("gloo", 0, True, "aaaa", ["gloo"] * 3),
    ],
)
def test_groups_use_shm_within_a_machine(
    monkeypatch, backend, link_mbps, barrier, machines, expected
):
    monkeypatch.setattr(simulate, "SimulatedLink", lambda *args: SimpleNamespace())
    everyone = SimpleNamespace(all_gather_object=lambda own: list(machines), world_size=4)
    config = launch_flags("cpu", backend)
    config.link_mbps = link_mbps
    launch.resolve_device(config)
    mesh = launch.make_mesh(config, everyone, barrier)
    assert mesh.device == CPU
    in_replica, between_replicas, between_machines = expected
    assert mesh.backend([0, 1], crosses_replicas=False) == in_replica
    assert mesh.backend([0, 1], crosses_replicas=True) == between_replicas
    assert mesh.backend([1, 2], crosses_replicas=True) == between_machines


@each_row(
    "machines, given, rounds, expected_s, few",
    [
        ("aabb", 0, True, 3600, True),
        ("aabb", 0, False, 3600, False),  # minibatch: its sums are needed at once
        ("aaaa", 0, True, 600, False),
        ("aabb", 7, True, 7, True),
    ],
)
def test_nccl_between_machines_waits_an_hour_and_syncs_with_few_sms(
    monkeypatch, machines, given, rounds, expected_s, few
):
    """Its watchdog counts from the issue, and the host issues a whole sync at once."""
    replace_functions(monkeypatch, torch.cuda, device_count=1, set_device=None)
    monkeypatch.setattr(os, "environ", {})
    config = launch_flags("cuda", "nccl")
    config.timeout_s = given
    if rounds:
        config.sync_warmup_steps = 0
    everyone = SimpleNamespace(all_gather_object=lambda own: list(machines), world_size=4)
    mesh = launch.make_mesh(config, everyone)
    assert mesh.timeout == timedelta(seconds=expected_s)
    assert mesh.few_sms([0, 2]) == few


@each_row("given", [None, "0"])
def test_nccl_launches_in_the_order_of_issue_by_default(monkeypatch, given):
    """Operations of two communicators in flight may hang otherwise."""
    replace_functions(monkeypatch, torch.cuda, device_count=1, set_device=None)
    environment = {}
    if given is not None:
        environment[ORDER] = given
    monkeypatch.setattr(os, "environ", environment)
    config = launch_flags("cuda", "gloo")
    everyone = Mesh(1, CPU)
    launch.make_mesh(config, everyone)
    assert os.environ.get(ORDER) == given

    config.backend = "nccl"
    launch.make_mesh(config, everyone)
    assert os.environ[ORDER] == (given or "1")


@each_row(
    "names, expected",
    [
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": ""}, None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "=eth1"),  # without "=" also eth10
        ({"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0"}, "ib0"),
    ],
)
def test_nccl_takes_the_interface_of_gloo(monkeypatch, names, expected):
    """Else it would choose one by itself, perhaps one that the other machines do not reach."""
    replace_functions(monkeypatch, torch.cuda, device_count=1, set_device=None)
    monkeypatch.setattr(os, "environ", dict(names))
    launch.make_mesh(launch_flags("cuda", "nccl"), Mesh(1, CPU))
    assert os.environ.get("NCCL_SOCKET_IFNAME") == expected


@each_row(
    "backend, gpus, local_rank, refused",
    [
        ("auto", 4, 3, False),
        ("shm", 2, 3, False),
        ("auto", 2, 3, True),
        ("auto", 1, 1, True),
        ("auto", 1, 0, False),  # it may see only its own GPU, like all others
    ],
)
@each_row("own_host", [False, True])
def test_ranks_that_share_a_gpu_are_refused_for_nccl_unless_each_says_it_is_a_host(
    monkeypatch, backend, gpus, local_rank, refused, own_host
):
    """One of them is, at least."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    if own_host:
        monkeypatch.setenv("NCCL_HOSTID", f"host-{local_rank}")
        refused = False
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    replace_functions(monkeypatch, torch.cuda, device_count=gpus, is_available=True)
    config = launch_flags("auto", backend)
    outcome = contextlib.nullcontext()
    if refused:
        message = "some ranks share a GPU; lower --nproc_per_node"
        outcome = pytest.raises(UserError, match=message)
    with outcome:
        launch.resolve_device(config)
    assert config.device == "cuda"
