"""Branch, train, merge: replicas that train apart, judged as one merged model and as an ensemble.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 4 -m lab.merge --device cpu --out_dir out/merge

This is `train.py --method post_local_sgd --tau 1000000000`: after the warm-up the replicas do not
communicate, and at the end their parameters are averaged once. In addition each replica, which must
be one rank, writes its own parameters before that: OUT_DIR/replica-I.pt. An ensemble predicts the
mean of the probabilities of its models.

Source: Branch-Train-Merge, arXiv 2208.03306 (without its domains).
"""

import math
import sys
from pathlib import Path

import torch

import data
import train
from config import run_command
from model import Llama
from plumbing.load_model import open_model
from relatives.post_local_sgd import PostLocalSGD


class Apart(PostLocalSGD):
    def sync(self):
        state = {}
        for l, (layout, master) in enumerate(zip(self.model.layouts, self.model.masters)):
            for name, x in layout.cut(master).items():
                state[f"layers.{l}.{name}"] = x
        torch.save(state, Path(self.config.out_dir, f"replica-{self.mesh.replica}.pt"))
        super().sync()


@torch.no_grad()
def judge(folder, eval_batches: int = 16, data_path: str | None = None) -> dict:
    """Validation losses, as train.py's: of the ensemble, and the mean of the models' own."""
    config = open_model(str(Path(folder, "model.pt"))).config
    models = []
    for path in sorted(Path(folder).glob("replica-*.pt")):
        models.append(Llama(config))
        models[-1].load_state_dict(torch.load(path, weights_only=True))

    M = len(models)
    found = []
    corpus = data.load(data_path, 0)
    batches = data.Batches(corpus, config.block_size, batch_size=16)
    for x, y, _ in batches.validation(eval_batches):
        logits = torch.stack([model(x) for model in models])  # (M, B, T, V)
        y = y.expand(M, *y.shape)[..., None]
        found.append(logits.log_softmax(dim=-1).gather(3, y).flatten(1))  # (M, B T)
    logs = torch.cat(found, dim=1)
    mixture = logs.logsumexp(dim=0) - math.log(M)
    return {"ensemble": -mixture.mean().item(), "alone": -logs.mean().item()}


def main():
    train.METHODS["post_local_sgd"] = Apart
    train.main(["--method", "post_local_sgd", "--tau", "1000000000", *sys.argv[1:]])


if __name__ == "__main__":
    run_command("lab.merge", main)
