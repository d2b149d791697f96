"""Averaged gradients, the baseline: their mean over all ranks in every step.

    for each step:
        g   = mean over all M * N ranks of the gradient  # [shard] reduce-scatter, [sync] all-reduce
        x  <- AdamW(x, clip(g))                          # identical on all replicas

This is synchronous data parallelism on sharded parameters (HSDP): a method whose warm-up never
ends. The all-reduce is in shard.py, where it overlaps with the backward.

    M replicas of N shards, P elements of a layer; sum: over the layers

Slow-link bytes per rank and step: 2 (M-1)/M * 4 sum P/N, and a few for loss, norm and a request to
stop.
Run: python train.py --method minibatch
Plain version: plain/minibatch.py.
"""

import math
from dataclasses import dataclass

import config
from method import Method


@dataclass
class Config(config.Config):
    # The warm-up never ends, so sync() is never called. Without a type annotation it is no field of
    # the dataclass, so it is no flag.
    sync_warmup_steps = math.inf


class MiniBatch(Method):
    Config = Config
