"""Averaged gradients, in every step. The warm-up of all other methods is the same.

Sharded twin: minibatch.py.
"""

from plain.method import Method


class MiniBatch(Method):
    """Its warm-up never ends: averaged_step() of train.py is all of it."""
