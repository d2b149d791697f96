"""The largest elements of vectors, and their exchange between replicas.

A layer's shard is cut into chunks of 4,096 consecutive elements; what is left is a shorter chunk.
Of each chunk of n elements the round(density n) largest are sent, at least one: a position in 12
bits and what a method sends of the value. All replicas add up the same bytes, in rank order, so
they stay bit-equal.
Plain version: plain/sparse.py.
"""

import torch
from torch.nn.functional import pad

from relatives.quantize import pack, unpack

CHUNK = 4096  # elements


def largest(vector, model, density: float):
    """The k largest absolute values of each chunk: where they are in the vector, which is laid out
    like model.master, and where in their chunks. Two lists of matrices (R, k), for R chunks of one
    length each."""
    found = []
    positions = []
    for view in model.used_views(vector):
        whole = len(view) // CHUNK * CHUNK
        for part in view[:whole].view(-1, CHUNK), view[whole:].view(1, -1):
            if part.numel() == 0:
                continue
            k = max(1, round(density * part.shape[1]))
            position = part.abs().topk(k, dim=1, sorted=False).indices
            first = part.storage_offset() - vector.storage_offset()
            firsts = torch.arange(first, first + part.numel(), CHUNK, device=part.device)
            found.append(firsts[:, None] + position)
            positions.append(position)
    return found, positions


def flat(matrices: list):
    return torch.cat([matrix.flatten() for matrix in matrices])


def gather_entries(mesh, found: list, positions: list, payload):
    """For each replica, in rank order: where its elements are in the vector, (n,), and its payload,
    bytes. Waits for them."""
    own = flat(positions)
    firsts = flat(found) - own  # of the chunks
    own = pad(own, (0, len(own) % 2))  # two positions are three bytes
    high = pack((own >> 8).to(torch.uint8), bits=4)
    row = torch.cat([high, (own & 255).to(torch.uint8), payload])
    # [sync] all-gather, payload and 12 bits per position, once per call
    for row in mesh.gather_rows(row, mesh.sync_group):
        high, low, payload = row.split([len(high), len(own), len(payload)])
        theirs = (unpack(high, bits=4).flatten().long() << 8) + low
        yield firsts + theirs[: len(firsts)], payload.clone()
