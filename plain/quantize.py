"""Vectors in 1 to 8 bits as a receiver decodes them, and their mean over the replicas.

Nothing is packed here: `rounded` gives the values that would arrive. In the mean over M > 2
replicas each piece of a vector has an owner, which adds up what all send and sends the mean,
rounded once more. Two replicas send all to each other and round once. One replica sends nothing.
Sharded twin: relatives/quantize.py, which has the codes and the two hops.
Source: Streaming DiLoCo, arXiv 2501.18512; 1-bit Adam, arXiv 2102.02888, for the errors.
"""

import math

import torch

from plain.method import mean, pieces, weighted_sum

BLOCK = 256  # elements with a scale of their own


def fp32(number):
    """A scale travels in fp32."""
    return number.float().to(number.dtype)


def int8(block):
    # s = max |v| / 127;  v -> s round(v / s)
    s = fp32(block.abs().max() / 127)
    if s == 0:
        return torch.zeros_like(block)
    return s * (block / s).round()


def e3m0(block):
    """The nearest of 0, s/64, s/32, ..., s; the larger one of two that are as near."""
    s = fp32(block.abs().max())
    levels = s * torch.tensor([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0]).to(block)
    distance = (block.abs()[:, None] - levels).abs()
    nearest = distance.argmin(dim=1)  # the first one of equals
    return block.sign() * levels[nearest]


def log8(block):
    """The nearest s 2^(-e/8), as exponents, e = 0 .. 254. 0 stays 0, nothing else becomes 0."""
    s = fp32(block.max())
    # e = 8 log2(s / v)
    e = (8 * torch.log2(s / block)).round().clamp(0, 254)
    return torch.where(block > 0, s * 2.0 ** (-e / 8), 0.0)


def signs(block):
    """The sign of 0 is +."""
    return torch.where(block >= 0, 1.0, -1.0)


def sign(block):
    # s = the mean of |v| over the elements that are not 0;  v -> +-s
    s = block.abs().sum() / max(1, block.count_nonzero())
    return signs(block) * fp32(s)


def two_bits(block):
    # s = the rms of the elements that are not 0;  v -> +-1.51 s if |v| > 0.9816 s, else +-0.4528 s
    s = fp32(block.norm() / math.sqrt(max(1, block.count_nonzero())))
    is_large = (block.abs() > 0.9816 * s).to(block.dtype)
    size = 1.510 * is_large + 0.4528 * (1 - is_large)
    return signs(block) * size * s


FORMATS = {"int8": int8, "e3m0": e3m0, "log8": log8, "sign": sign, "two_bits": two_bits}


def rounded(v, form):
    """C(v): v as its receiver decodes it."""
    blocks = [FORMATS[form](block) for block in v.split(BLOCK)]
    return torch.cat(blocks)


def quantized_mean(d, N, form, w=None):
    """sum_i w_i d_i of M replicas' vectors of one layer, of which N ranks have a piece each. w:
    weights with sum 1 (default: equal); a replica with weight 0 is left out."""
    M = len(d)
    if w is None:
        w = [1 / M] * M
    if M == 1 or form == "none":
        return weighted_sum(d, w)

    layer = slice(0, len(d[0]))
    means = []
    for piece in pieces([layer], N):
        arrived = [rounded(d_i[piece], form) for d_i in d]
        # dbar = sum_i w_i C(d_i)
        dbar = weighted_sum(arrived, w)
        if M > 2:  # the owner of a piece sends C(dbar)
            dbar = rounded(dbar, form)
        means.append(dbar)
    return torch.cat(means)


def mean_with_errors(z, E, layers, N, form):
    """The mean of what all replicas send, with error feedback. z_i: replica i's vector and its
    errors so far; E: the errors of the owners of all pieces. Returns (u, e, E): the mean that
    arrives, and what senders and owners have not sent and add to their next message."""
    M = len(z)
    exact = M == 1 or form == "none"
    u = torch.zeros_like(E)
    e = [torch.zeros_like(z_i) for z_i in z]
    new_E = E.clone()
    for piece in pieces(layers, N):
        sent = []
        for i in range(M):
            z_i = z[i][piece]
            C = z_i if exact else rounded(z_i, form)
            # e_i = z_i - C(z_i)
            e[i][piece] = z_i - C
            sent.append(C)

        # s = 1/M sum_i C(z_i)
        s = mean(sent)
        if M > 2:
            # s <- s + E;  u = C(s);  E <- s - C(s)
            s = s + E[piece]
            C = s if exact else rounded(s, form)
            new_E[piece] = s - C
            s = C
        u[piece] = s
    return u, e, new_E
