"""Vectors in 1, 2, 4 or 8 bits, and their mean over the replicas in quantized pieces.

A vector is cut into blocks of 256 consecutive elements. Each block has one fp32 scale s.

    format  bits  s             code                            error at most
    e3m0    4     max |v|       sign, and e in 0..7: 0 means 0, max(|v| / 3, s / 128)
                                else s * 2^(e-7); the nearest
    int8    8     max |v| / 127 round(v / s)                    s / 2
    log8    8     max v         255 for 0, else e in 0..254:    4.4% of v, if v > s / 2^31;
                                s * 2^(-e/8); v >= 0 only       only 0 becomes 0
    sign    1     mean |v|      sign (0 counts as +): +-s       |v| + s
    two_bits  2   rms           sign, and |v| > 0.9816 s:       |v| + s
                                +-1.51 s, else +-0.4528 s
    none    32    none          v, in its own dtype             0

The mean of sign and the rms of two_bits are over the elements that are not 0. two_bits has the
levels of Lloyd and Max for normally distributed elements: no others have a smaller mean square
error, which is 12% of the mean square.

    s = 0: all elements are 0. s not finite: all are NaN, so that a divergence shows.

The mean over M > 2 replicas takes two hops:

    start      encode; send piece j to replica j       # [sync] all-to-all of codes and scales
    halfway()  the owner of a piece decodes it from all replicas, its own too, takes the mean in
               rank order, encodes it                  # [sync] all-gather of codes and scales
    wait()     decode all pieces

Two replicas send all their codes to each other in one all-gather. One replica quantizes nothing.
All replicas decode the same bytes, so their results are bit-equal. Error: the mean of the replicas'
errors and, for M > 2, that of encoding the mean. With error feedback nothing is lost: a sender
keeps what it has not sent, e = v - C(v), and adds it to its next vector. The owner of a piece does
the same with its mean.

Bytes per rank: 2 (M-1)/M * bytes_per_element() per element (sign: 0.141, two_bits: 0.266, e3m0:
0.516, int8 and log8: 1.016, none: 4).
Source: Streaming DiLoCo, arXiv 2501.18512 (its scaling could not be read; this one is ours); 1-bit
Adam, arXiv 2102.02888, for sign and the errors of both hops.
Plain version: tests/reference/quantize.py.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad

from config import option
from method import LocalConfig

BLOCK = 256  # elements
FORMATS = ["none", "int8", "e3m0", "two_bits", "sign"]  # of vectors of either sign
BITS = {"sign": 1, "two_bits": 2, "e3m0": 4, "int8": 8, "log8": 8}  # of a code
THRESHOLD = 0.9816  # of two_bits
SMALL = 0.4528
LARGE = 1.510
MAGNITUDES = (0.0, *(2.0 ** (e - 7) for e in range(1, 8)))  # of e3m0
VALUES = {  # code -> value, in scales
    "sign": [-1.0, 1.0],
    "two_bits": [-SMALL, SMALL, -LARGE, LARGE],
    "e3m0": [*MAGNITUDES, *(-m for m in MAGNITUDES)],  # code: 8 * sign + e
    "log8": [*(2.0 ** (-e / 8) for e in range(255)), 0.0],
}


def encode(x: torch.Tensor, format: str) -> torch.Tensor:
    """Blocks (B, 256) -> codes and scale of each, (B, bytes) uint8."""
    if format == "none":
        return x.view(torch.uint8)
    if format == "sign":
        scale = norms(x, 1) / norms(x, 0).clamp(min=1)
        codes = (x >= 0).view(torch.uint8)
    elif format == "two_bits":
        scale = norms(x, 2) / norms(x, 0).clamp(min=1).sqrt()
        large = x.abs() > THRESHOLD * scale[:, None]
        codes = (x >= 0).view(torch.uint8) + (large.view(torch.uint8) << 1)
    elif format == "int8":
        scale = norms(x, torch.inf) / 127
        codes = relative(x, scale).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    elif format == "log8":
        scale = norms(x, torch.inf)
        steps = relative(x, scale).log2_().mul_(-8).round_().clamp_(0, 254)
        codes = steps.masked_fill_(x == 0, 255).to(torch.uint8)
    else:
        scale = norms(x, torch.inf)
        size = relative(x, scale).abs_()
        codes = (x < 0).view(torch.uint8) << 3
        for smaller, larger in pairwise(MAGNITUDES):
            codes += size >= (smaller + larger) / 2
    scale = scale.float()
    scale = scale.where(scale.isfinite(), torch.nan)[:, None]
    return torch.cat([pack(codes, BITS[format]), scale.view(torch.uint8)], dim=1)


def norms(x, order):
    """Of each block, (B,). Order 0: how many elements are not 0."""
    return torch.linalg.vector_norm(x, order, dim=1)


def relative(x, scale):
    """x / scale as the receiver knows it; 0 where all elements are 0."""
    scale = scale.float()
    return x / scale.masked_fill(scale == 0, 1)[:, None]


def pack(codes, bits: int):
    """Codes of 1, 2, 4 or 8 bits (..., n) -> whole bytes, the first code in the lowest bits."""
    in_byte = 8 // bits
    packed = torch.zeros_like(codes[..., ::in_byte])
    for place in range(in_byte):
        packed |= codes[..., place::in_byte] << place * bits
    return packed


def unpack(packed, bits: int):
    """Bytes (n,) -> the codes in each, (n, 8 / bits)."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed[:, None] >> places & 2**bits - 1


def decode(coded: torch.Tensor, format: str, dtype=torch.float32) -> torch.Tensor:
    """The inverse: codes and scales (B, bytes) uint8 -> blocks (B, 256)."""
    if format == "none":
        return coded.view(dtype)
    codes = coded[:, :-4]
    scale = coded[:, -4:].contiguous().view(torch.float32).to(dtype)
    if format == "int8":
        return codes.view(torch.int8).to(dtype).mul_(scale)
    table = decoded_bytes(format, coded.device, dtype)
    values = table.index_select(0, codes.reshape(-1).int())
    return values.view(len(coded), BLOCK).mul_(scale)


@functools.cache  # A table is copied to a GPU once, because the host waits for the copy.
def decoded_bytes(format: str, device, dtype) -> torch.Tensor:
    """A table: byte -> its elements, in scales."""
    codes = unpack(torch.arange(256), BITS[format])
    return torch.tensor(VALUES[format], dtype=dtype)[codes].to(device)


def bytes_per_element(format: str) -> float:
    return encode(torch.zeros(1, BLOCK), format).numel() / BLOCK


def blocks(size: int) -> int:
    """How many blocks a vector takes."""
    return -(-size // BLOCK)


@dataclass
class QuantizedConfig(LocalConfig):
    """Flags of a method that sends a mean over the replicas in one of the formats."""

    quantize: str = option("e3m0", "what is sent", choices=FORMATS)

    def sent_vectors(self, replicas):
        return bytes_per_element(self.quantize) / 4 * super().sent_vectors(replicas)


class MeanInFlight:
    """The mean over the sync group of flat vectors, each cut into blocks of its own. weights: None,
    or a function that returns (M, vectors) with mean 1 over the replicas; it is called after the
    first hop. A vector with weight 0 is left out, also if it contains NaN. errors: for error
    feedback, a vector for each of `vectors`, which is 0 before the first mean: the owner's errors,
    see above. Then `vectors` become the errors of this replica as a sender."""

    def __init__(self, vectors: list, format: str, mesh, weights=None, errors=()):
        self.mesh = mesh
        self.M = mesh.replicas
        self.weights = weights
        self.errors = errors
        self.format = format if self.M > 1 else "none"
        self.dtype = vectors[0].dtype
        self.sizes = [len(vector) for vector in vectors]
        self.first_hop = None
        needed = max(1, sum(map(blocks, self.sizes)))  # a shard may be padding
        if self.M <= 2:
            return self._gather(self._encode(vectors, needed))
        self.piece = -(-needed // self.M)  # blocks
        codes = self._encode(vectors, self.M * self.piece)
        self.received = torch.empty_like(codes)
        # [sync] all-to-all, codes of the vectors, asynchronous
        self.first_hop = mesh.all_to_all(self.received, codes, mesh.sync)

    def halfway(self):
        """Start the second hop, if there is one. Waits for the first."""
        if not self.first_hop:
            return
        self.first_hop.wait()
        self.first_hop = None
        own = self._own_slices()
        mean = self._mean([len(range(size)[place]) for size, place in zip(self.sizes, own)])
        for l, E in enumerate(self.errors):
            s = mean[l] + E[own[l]]
            E.zero_()  # after a resume on another mesh there may be errors beside the piece
            mean[l] = E[own[l]].copy_(s)  # a view: _encode() leaves in E what is not sent
        self._gather(self._encode(mean, self.piece))

    def wait(self) -> list:
        """The mean of each vector."""
        self.halfway()
        self.handle.wait()
        if self.M > 2:
            return list(self._decode(self.received, self.sizes))
        return self._mean(self.sizes)

    def _own_slices(self) -> list:
        """What of each vector is in the piece of this replica."""
        length = self.piece * BLOCK
        begin = self.mesh.replica * length
        found = []
        for size in self.sizes:
            found.append(slice(max(0, begin), max(0, begin + length)))
            begin -= blocks(size) * BLOCK  # the next vector begins there
        return found

    def _encode(self, vectors, count: int) -> torch.Tensor:
        """The codes of the vectors, one at a time, and zeros up to `count` blocks. With error
        feedback the vectors become what their codes have lost."""
        found = []
        for vector in vectors:
            rows = pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
            codes = encode(rows, self.format)
            found.append(codes)
            if self.errors:
                vector.sub_(decode(codes, self.format, self.dtype).view(-1)[: len(vector)])
        codes = torch.cat(found)
        return pad(codes, (0, 0, 0, count - len(codes)))

    def _decode(self, codes, sizes):
        """Yields the vectors of these sizes, one at a time."""
        counts = [blocks(size) for size in sizes]
        for size, rows in zip(sizes, codes[: sum(counts)].split(counts)):
            yield decode(rows, self.format, self.dtype).view(-1)[:size]

    def _gather(self, own):
        """received <- the codes of all replicas."""
        self.received = own.new_empty(self.M * len(own), own.shape[1])
        self.received.chunk(self.M)[self.mesh.sync.index].copy_(own)
        # [sync] all-gather, codes of each piece's mean (M = 2: of the vectors), asynchronous
        self.handle = self.mesh.all_gather(self.received.view(-1), self.mesh.sync)

    def _mean(self, sizes) -> list:
        """The mean of vectors of these sizes, from the codes of all replicas, in rank order."""
        weights = None
        if self.weights:
            weights = self.weights()
        means = []
        replicas = [self._decode(codes, sizes) for codes in self.received.chunk(self.M)]
        for l, copies in enumerate(zip(*replicas)):
            if weights is not None:  # weight 0 leaves a vector out, also if it is not finite
                for w, x in zip(weights[:, l], copies):
                    x.mul_(w).masked_fill_(w == 0, 0)
            total = functools.reduce(torch.Tensor.add_, copies)
            means.append(total.div_(self.M))
        return means
