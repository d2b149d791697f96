"""The plain versions: every method a second time, in one process, as its equations read.

There are M whole models, no ranks and no collectives. It runs on any operating system. You can set
a breakpoint anywhere (give OMP_NUM_THREADS=1, which keeps it to one thread). The plain versions are
written from the papers, not from the sharded ones. Both share the network (model.py), the windows
of the corpus that a rank reads (data.py) and the flags (config.py). In fp64 both give the same
losses, to 1e-9: tests/test_methods.py.

    python -m plain --method edit --replicas 4 --tau 16
    python -m plain --method diloco --help

Start with diloco.py and edit.py: what a sync computes. Then read train.py, the loop, method.py, the
hooks, and replica.py, a model with its AdamW. text.py has the model and the windows of a text. Any
other layers train, too: examples/own_layers.py. methods.py names all methods, and every file here
its sharded twin.
"""

from plain.quantize import rounded
from plain.text import text_training
from plain.train import Training

__all__ = ["Training", "rounded", "text_training"]
