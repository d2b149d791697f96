"""Slow: a run on two nodes loses one and gains one, as torchrun --nnodes 1:2 allows, and loses the one
with the rendezvous. Two agents on this machine stand for the nodes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plumbing.checkpoint import list_checkpoints
from ranks import ROOT, flags

pytestmark = pytest.mark.slow
STEPS = 800
TRAIN = flags(method="edit", n_layer=2, n_embd=32, n_head=2, block_size=32, batch_size=8, tau=16)
TRAIN += "--device cpu --dtype fp32 --tokens_per_step 1024 --sync_warmup_steps 40 --lr 0.003".split()
TRAIN += "--log_interval 1 --checkpoint_interval 50".split()
TRAIN += "--eval_interval 800 --eval_batches 1".split()
TRAIN += "--resume auto --save_on_exit".split()


def last_step(folder) -> int:
    return max((int(path.name.split("-")[1]) for path in list_checkpoints(folder)), default=0)


def rows(folder) -> list:
    """The complete lines of the record."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(done, agents, seconds=900):
    deadline = time.monotonic() + seconds
    while not done():
        ended = [agent for agent in agents if agent.poll() not in (None, -signal.SIGKILL)]
        late = time.monotonic() > deadline
        assert not ended and not late, [agent.log.read_text()[-3000:] for agent in agents]
        time.sleep(0.1)


def listening(port) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def node(tmp_path):
    """node(folder, steps, **environment): torchrun on one of at most two nodes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        agents = []

    def start(folder, steps=STEPS, **environment):
        torchrun = "-m torch.distributed.run --nnodes 1:2 --nproc_per_node 1 --max-restarts 5"
        torchrun += f" --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{port} --rdzv_id elastic"
        # A node that is silent for three intervals counts as lost, also if it is only slow.
        torchrun += " --local_addr 127.0.0.1 --rdzv_conf last_call_timeout=3,keep_alive_interval=4"
        argv = [sys.executable, *torchrun.split(), "train.py", *TRAIN]
        argv += ["--out_dir", str(folder), "--max_steps", str(steps)]
        log = tmp_path / f"log-{len(agents)}"
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        options = dict(stdout=open(log, "w"), stderr=subprocess.STDOUT, start_new_session=True)
        agents.append(subprocess.Popen(argv, cwd=ROOT, env=environment, **options))
        agents[-1].log = log
        wait_until(lambda: listening(port), agents[-1:], 120)  # the first agent has the store
        return agents[-1]

    start.agents = agents
    yield start
    for agent in agents:
        kill(agent)


def kill(agent):
    """The node is gone: the agent and its worker."""
    if agent.poll() is None:
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for process in (agent.pid, *map(int, workers)):
            os.kill(process, signal.SIGKILL)
        agent.wait()


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_run_goes_on_when_a_node_is_lost_and_when_one_joins(node, tmp_path):
    run = tmp_path / "run"
    stays = node(run, **OWN_STORE)
    lost = node(run, **OWN_STORE)
    agents = [stays, lost]
    worlds = lambda: [row["world_size"] for row in rows(run) if "world_size" in row]
    # Under load the second node may come late: then the first one begins alone.
    wait_until(lambda: last_step(run) >= 100 and worlds()[-1] == 2, agents)
    began = time.monotonic()
    kill(lost)
    wait_until(lambda: worlds()[-2:] == [2, 1], agents)
    alone_s = time.monotonic() - began
    wait_until(lambda: last_step(run) >= 200, agents)
    agents.append(node(run, **OWN_STORE))
    began = time.monotonic()
    wait_until(lambda: worlds()[-3:] == [2, 1, 2], agents)
    together_s = time.monotonic() - began
    assert [stays.wait(900), agents[-1].wait(900)] == [0, 0], stays.log.read_text()

    found = rows(run)
    steps = [row for row in found if row["event"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in steps] == [1024 * step for step in range(1, STEPS + 1)]
    resumed = [row["step"] for row in found if row["event"] == "resume"]
    for step in resumed:  # it goes on with the model that was saved: a new one has a loss of 5.5
        before, after = [row["loss"] for row in steps[step - 1 : step + 1]]
        assert abs(after - before) < 1  # of one batch each
    print(f"alone after {alone_s:.0f} s, together after {together_s:.0f} s, from steps {resumed}")


def test_same_command_continues_a_run_that_has_lost_the_node_with_the_rendezvous(node, tmp_path):
    """As README and slurm.sh say."""
    run = tmp_path / "run"
    holder = node(run, 150, **OWN_STORE)
    other = node(run, 150, **OWN_STORE)
    wait_until(lambda: last_step(run) >= 50, [holder, other])
    kill(holder)
    assert other.wait(120) != 0
    before = last_step(run)
    assert before < 150

    again = [node(run, 150, **OWN_STORE) for _ in range(2)]
    assert [agent.wait(900) for agent in again] == [0, 0], again[0].log.read_text()
    found = rows(run)
    assert [row["step"] for row in found if row["event"] == "resume"][-1] == before
    assert [row["step"] for row in found if row["event"] == "step"] == list(range(1, 151))
