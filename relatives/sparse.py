"""The largest elements of vectors, and their exchange between replicas.

A layer's shard is cut into chunks of 4,096 consecutive elements; what is left is a shorter chunk.
Of each chunk of n elements the round(density n) largest are sent, at least one: a position in 12
bits and what a method sends of the value. All replicas add up the same bytes, in rank order, so
they stay bit-equal.
Plain version: tests/reference/sparse.py.
"""

import math

import torch
from torch.nn.functional import pad

CHUNK = 4096  # elements


def chunks(vector, model) -> list:
    """A vector laid out like model.master as matrices with a chunk in each row: (R, 4096) and the
    rest (1, n) of each layer."""
    parts = []
    for view in model.used_views(vector):
        whole = len(view) // CHUNK * CHUNK
        parts += [view[:whole].view(-1, CHUNK), view[whole:].view(1, -1)]
    return [part for part in parts if part.numel()]


def largest(part, density: float):
    """Where the k largest absolute values of each row are, (R, k)."""
    k = max(1, round(density * part.shape[1]))
    return part.abs().topk(k, dim=1, sorted=False).indices


def steps(of: int, bits: int, device):
    return torch.arange(0, of, bits, device=device)


def pack(numbers, bits: int):
    """Whole numbers (n,) of `bits` bits -> bytes. A word: the fewest that fill whole bytes."""
    word = math.lcm(bits, 8)
    groups = pad(numbers, (0, -len(numbers) % (word // bits))).view(-1, word // bits)
    words = (groups << steps(word, bits, numbers.device)).sum(dim=1, keepdim=True)
    return (words >> steps(word, 8, numbers.device)).to(torch.uint8).view(-1)


def unpack(packed, count: int, bits: int):
    """The inverse. count: n."""
    word = math.lcm(bits, 8)
    words = packed.view(-1, word // 8).long() << steps(word, 8, packed.device)
    words = words.sum(dim=1, keepdim=True)
    return (words >> steps(word, bits, packed.device) & 2**bits - 1).view(-1)[:count]


def gather_entries(mesh, positions: list, payload):
    """For each replica, in rank order: its positions, matrices of these shapes, and its payload,
    bytes (n,). Waits for them."""
    own = torch.cat([at.view(-1) for at in positions])
    counts = [at.numel() for at in positions]
    row = torch.cat([payload, pack(own, bits=12)])
    # [sync] all-gather, payload and 12 bits per position, once per call
    for row in mesh.gather_rows(row, mesh.sync):
        theirs = unpack(row[len(payload) :], len(own), bits=12).split(counts)
        theirs = [part.view(at.shape) for part, at in zip(theirs, positions)]
        yield theirs, row[: len(payload)].clone()
