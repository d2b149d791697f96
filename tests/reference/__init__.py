"""The plain versions: every method a second time, from its equations, as plainly as possible.

One process, fp64, M whole models. They are written from the papers, not from the product, and share
with it only the network (model.Llama) and which windows of the corpus a rank reads (data.py).
Start with simulation.py, the training loop, and core.py, a replica and a method's hooks. Then read
a method: each one's docstring in the product names its file here.
"""

from reference.quantize import rounded
from reference.sick import Sick
from reference.simulation import METHODS, Simulation

__all__ = ["METHODS", "Sick", "Simulation", "rounded"]
