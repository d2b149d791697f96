"""Two machines on one: network namespaces, a link of 100 Mbit/s, no shared folder. Needs
root (and ip, tc, unshare: iproute2, util-linux). Not part of the test suite. It runs what
docs/two_machines.md says:

    sudo python tests/namespaces.py [NEW_FOLDER]

    1  without GLOO_SOCKET_IFNAME: a line, no run (the machines' names mean 127.0.1.1, as on Debian)
    2  a run that nothing disturbs
    3  machine B loses its power in a round; A ends with a line; both are started again
    4  B's programs are killed, with --max-restarts: only B is started again
    5  the machines change places: a line names --node_rank

The losses of 3 and 4 must be those of 2, bit for bit.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = "laptop-a", "laptop-b"
ADDRESSES = "10.68.0.1", "10.68.0.2"
PORT = 29500
TRAIN = "--n_layer 2 --n_embd 64 --block_size 32 --method edit --tau 8 --sync_warmup_steps 8 "
TRAIN += "--max_steps 64 --eval_interval 32 --log_interval 1 --device cpu --dtype fp32 "
TRAIN += "--data ../corpus --out_dir run --checkpoint_interval 8 --resume auto --timeout_s 20"


def sh(line: str):
    subprocess.run(line.split(), check=True)


def connect():
    """Two namespaces and a shaped link."""
    sh("ip link add edit0 type veth peer name edit1")
    for i, name in enumerate(NAMES):
        sh(f"ip netns add {name}")
        sh(f"ip link set edit{i} netns {name}")
        inside = f"ip netns exec {name}"
        sh(f"{inside} ip address add {ADDRESSES[i]}/24 dev edit{i}")
        sh(f"{inside} ip link set edit{i} up")
        sh(f"{inside} ip link set lo up")
        sh(f"{inside} tc qdisc add dev edit{i} root tbf rate 100mbit burst 64kb latency 200ms")


def disconnect():
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
    subprocess.run("ip link delete edit0".split(), stderr=subprocess.DEVNULL)


class Machine:
    """A torchrun in a namespace, with process ids, a name and an /etc/hosts of its own."""

    def __init__(self, number, folder, launcher="", interface=True, node_rank=None):
        self.name = name = NAMES[number]
        self.link = f"edit{number}"
        place = folder / name
        place.mkdir(exist_ok=True)
        (place / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        rank = number if node_rank is None else node_rank
        master = ADDRESSES[number if rank == 0 else 1 - number]
        line = f"mount --bind {place}/hosts /etc/hosts; hostname {name}; cd {place}; "
        if interface:
            line += f"export GLOO_SOCKET_IFNAME={self.link}; "
        line += f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc_per_node 1 "
        line += f"--node_rank {rank} --master_addr {master} --master_port {PORT} {launcher} "
        line += f"{ROOT}/train.py {TRAIN}"
        own = "unshare --pid --fork --kill-child --mount-proc --uts sh -c"
        self.path = place / f"log-{len(list(place.glob('log-*')))}"
        with open(self.path, "w") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", name, *own.split(), line],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def wait_for(self, text):
        while text not in self.path.read_text():
            assert self.process.poll() is None, self.path.read_text()
            time.sleep(0.02)

    def switch_off(self, silently):
        """All its processes at once: the first one of their namespace dies. silently: the link
        first, so that nobody is told that connections are closed."""
        if silently:
            self.set_link("down")
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def set_link(self, state):
        sh(f"ip netns exec {self.name} ip link set {self.link} {state}")

    def wait(self) -> int:
        return self.process.wait(900)

    def lines(self, word) -> list:
        return [line for line in self.path.read_text().splitlines() if word in line]


def both(folder, **options):
    return [Machine(number, folder, **options) for number in (0, 1)]


def losses(folder) -> list:
    rows = map(json.loads, open(folder / NAMES[0] / "run" / "metrics.jsonl"))
    names = "event", "step", "loss", "val_loss"
    return [[row.get(name) for name in names] for row in rows if row["event"] in ("step", "eval")]


def start_anew(folder):
    for name in NAMES:
        shutil.rmtree(folder / name / "run", ignore_errors=True)


def main(folder):
    text = folder / "text.txt"
    text.write_text(Path(ROOT, "mesh.py").read_text() + Path(ROOT, "shard.py").read_text())
    corpus = [sys.executable, f"{ROOT}/data.py", "--input", str(text)]
    subprocess.run([*corpus, "--out", str(folder / "corpus")], check=True, cwd=ROOT)

    machines = both(folder, interface=False)
    codes = [machine.wait() for machine in machines]
    (line,) = machines[0].lines("train.py: error: ")[:1]
    assert 0 not in codes and "GLOO_SOCKET_IFNAME" in line, codes
    print(f"1  {line}")

    machines = both(folder)
    assert [machine.wait() for machine in machines] == [0, 0], machines[0].path.read_text()
    expected = losses(folder)
    print(f"2  {machines[0].lines('sync 0003')[-1]}\n   {machines[0].lines('done |')[-1]}")

    for number, launcher in (3, ""), (4, "--max-restarts 3"):
        start_anew(folder)
        a, b = both(folder, launcher=launcher)
        a.wait_for("step 00030/")
        b.switch_off(silently=not launcher)
        began = time.time()
        if launcher:
            a.wait_for("lost contact with another rank")
        else:
            assert a.wait() != 0
        noticed_s = time.time() - began
        (line,) = a.lines("train.py: error: ")
        print(f"{number}  after {noticed_s:.1f} s: {line}")
        if launcher:
            b = Machine(1, folder, launcher)
        else:
            b.set_link("up")
            a, b = both(folder)
        assert [a.wait(), b.wait()] == [0, 0], a.path.read_text()
        print("   " + a.lines("resume  ")[-1])
        assert losses(folder) == expected
        print("   the losses are those of the undisturbed run")

    changed = [Machine(number, folder, node_rank=1 - number) for number in (0, 1)]
    codes = [machine.wait() for machine in changed]
    (line,) = changed[1].lines("train.py: error: ")[:1]
    assert 0 not in codes and "--node_rank" in line, line
    print(f"5  {line}")


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("namespaces.py: needs root")
    place = Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.mkdtemp())
    place.mkdir(parents=True, exist_ok=not sys.argv[1:])
    disconnect()
    try:
        connect()
        main(place)
    finally:
        disconnect()
