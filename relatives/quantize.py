"""Vectors in 1, 2, 4 or 8 bits an element, and their mean over the replicas.

A vector is cut into blocks of 256 consecutive elements. Of each block, one fp32 scale s and a code
of a few bits for each element are sent:

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
error, which is 12% of the mean square. If s is 0, all elements decode to 0; if s is not finite,
all decode to NaN, so that a divergence shows.

The mean of a vector over M > 2 replicas takes two hops, that is, two transfers, one after the
other. The vector is cut into M pieces, and replica j is the owner of piece j:

    MeanInFlight()  encode the vector
                    send piece j to replica j                  # [sync] all-to-all of codes
    halfway()       as owner: decode the piece of all replicas, take its mean in rank order,
                    encode that; send it to all replicas       # [sync] all-gather of codes
    wait()          decode all pieces

Two replicas need one hop: each sends its codes to the other (all-gather), and both take the mean.
One replica quantizes nothing. All replicas decode the same bytes, so their means are bit-equal.

Error feedback. Let C(v) be v as the receivers decode it. A sender keeps the error e = v - C(v) and
adds it to its next vector, so in the long run nothing is lost. With two hops the owner of a piece
does the same with the mean of that piece; its error is E.

Bytes per rank and element: 2 (M-1)/M * bytes_per_element(), which is 0.141 for sign, 0.266 for
two_bits, 0.516 for e3m0, 1.016 for int8 and log8, 4 for none.
Source: Streaming DiLoCo, arXiv 2501.18512 (its scaling could not be read; this one is ours); 1-bit
Adam, arXiv 2102.02888, for sign and the errors of both hops.
Plain version: plain/quantize.py.
"""

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import embedding, pad

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
    scale = scale_of(x, format)
    if format == "sign":
        codes = (x >= 0).view(torch.uint8)
    elif format == "two_bits":
        large = x.abs() > THRESHOLD * scale
        codes = (x >= 0).view(torch.uint8) + (large.view(torch.uint8) << 1)
    elif format == "int8":
        codes = relative(x, scale).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    elif format == "log8":
        steps = relative(x, scale).log2_().mul_(-8).round_().clamp_(0, 254)
        codes = steps.masked_fill_(x == 0, 255).to(torch.uint8)
    else:
        size = relative(x, scale).abs_()
        codes = (x < 0).view(torch.uint8) << 3
        for smaller, larger in pairwise(MAGNITUDES):
            codes += size >= (smaller + larger) / 2
    return torch.cat([pack(codes, BITS[format]), scale.view(torch.uint8)], dim=1)


def scale_of(x, format: str) -> torch.Tensor:
    """The scale of each block, (B, 1) fp32. NaN if it is not finite."""
    if format == "sign":
        scale = norms(x, 1) / norms(x, 0).clamp(min=1)  # order 0: how many are not 0
    elif format == "two_bits":
        scale = norms(x, 2) / norms(x, 0).clamp(min=1).sqrt()
    else:
        scale = norms(x, torch.inf)
    if format == "int8":
        scale /= 127
    scale = scale.float()
    return scale.where(scale.isfinite(), torch.nan)


def norms(x, order):
    return torch.linalg.vector_norm(x, order, dim=1, keepdim=True)


def relative(x, scale):
    """x / scale; 0 where all elements of a block are 0."""
    return x / scale.masked_fill(scale == 0, 1)


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
    return embedding(codes.int(), table).view(len(coded), BLOCK).mul_(scale)


@functools.cache  # A table is copied to a GPU once, because the host waits for the copy.
def decoded_bytes(format: str, device, dtype) -> torch.Tensor:
    """A table: byte -> its elements, in scales."""
    codes = unpack(torch.arange(256), BITS[format])
    return torch.tensor(VALUES[format], dtype=dtype)[codes].to(device)


@functools.cache
def bytes_of_block(format: str, dtype=torch.float32) -> int:
    return encode(torch.zeros(1, BLOCK, dtype=dtype), format).numel()


def bytes_per_element(format: str) -> float:
    return bytes_of_block(format) / BLOCK


@dataclass
class QuantizedConfig(LocalConfig):
    """Flags of a method that sends a mean over the replicas in one of the formats."""

    quantize: str = option("e3m0", "what is sent", choices=FORMATS)

    def sent_vectors(self, replicas):
        return bytes_per_element(self.quantize) / 4 * super().sent_vectors(replicas)


class MeanInFlight:
    """The means of some layers' flat vectors (P/N,) over the sync group, with one collective a hop
    for all of them: create it, halfway(), wait() for each layer.

    errors: for error feedback, vectors like them for the errors that this replica has as an owner,
    0 before the first mean. Then `vectors` become what this replica has not sent.
    row: this replica's scalars (n,), which travel with the first hop. weigh(rows) is called once
    they are there. It gets those of all replicas, (M, n), and returns each layer's weights (M,
    layers) with mean 1."""

    def __init__(self, vectors: list, format: str, mesh, errors=None, row=None, weigh=None):
        self.mesh = mesh
        self.M = mesh.replicas
        self.errors = errors
        self.row, self.weigh = row, weigh
        self.weights = None
        self.format = format if self.M > 1 else "none"
        self.dtype = vectors[0].dtype
        self.sizes = [len(vector) for vector in vectors]
        self.first_hop = self.last_hop = None  # handles
        self.senders = self.M
        pieces = self.M if self.M > 2 else 1
        # blocks in a piece of each layer; a shard may be padding
        self.blocks = [max(1, -(-size // (pieces * BLOCK))) for size in self.sizes]
        codes = self._encode(vectors, errors, pieces)
        if row is not None:
            row = row.view(torch.uint8).expand(pieces, -1)
            codes = torch.cat([codes, row], dim=1)
        if pieces == 1:
            self._gather(codes)
        else:
            self.received = torch.empty_like(codes)
            # [sync] all-to-all, codes of the vectors, asynchronous
            self.first_hop = mesh.all_to_all(self.received, codes, mesh.sync_group)

    def halfway(self):
        """Start the second hop, unless there is none or it has started. Waits for the first."""
        if not self.first_hop:
            return
        self.first_hop.wait()
        self.first_hop = None
        self._read_rows()
        means = []
        for l, (size, blocks) in enumerate(zip(self.sizes, self.blocks)):
            first = self.mesh.replica * blocks * BLOCK
            mean = self._mean(l)[: max(0, size - first)]  # without padding
            if self.errors is not None:
                E = self.errors[l][first : first + blocks * BLOCK]
                s = mean + E
                self.errors[l].zero_()  # after a resume on another mesh: errors beside E
                mean = E.copy_(s)  # _encode() leaves in it what is not sent
            means.append(mean)
        self.senders = 1  # of each piece of the mean: its owner
        self.weights = None
        self._gather(self._encode(means, self.errors, 1))

    def wait(self, l=0) -> torch.Tensor:
        """The mean of vector l, (P/N,)."""
        self.halfway()
        self.last_hop.wait()
        self._read_rows()
        return self._mean(l)[: self.sizes[l]]

    def _encode(self, vectors, errors, pieces: int) -> torch.Tensor:
        """Row j: the codes of piece j of every vector, padded with zeros. With error feedback the
        vectors become what their codes have lost."""
        parts = []
        for vector, blocks in zip(vectors, self.blocks):
            padding = pieces * blocks * BLOCK - len(vector)
            codes = encode(pad(vector, (0, padding)).view(-1, BLOCK), self.format)
            if errors is not None:
                vector.sub_(decode(codes, self.format, self.dtype).view(-1)[: len(vector)])
            parts.append(codes.view(pieces, -1))
        return torch.cat(parts, dim=1)

    def _gather(self, own):
        """received <- the codes of all replicas."""
        self.received = own.repeat(self.M, 1)
        # [sync] all-gather, codes of each piece's mean (M = 2: of the vectors), asynchronous
        self.last_hop = self.mesh.all_gather(self.received.view(-1), self.mesh.sync_group)

    def _read_rows(self):
        if self.row is not None:
            rows = self.received[:, -self.row.nbytes :].contiguous().view(self.row.dtype)
            self.row = None
            self.weights = self.weigh(rows)

    def _mean(self, l) -> torch.Tensor:
        """The mean of what the senders have sent of vector l, with padding."""
        width = bytes_of_block(self.format, self.dtype)
        first = sum(self.blocks[:l]) * width
        codes = self.received[:, first : first + self.blocks[l] * width]
        vectors = decode(codes.contiguous().view(-1, width), self.format, self.dtype)
        vectors = vectors.view(self.senders, -1)
        if self.weights is not None:
            w = self.weights[:, l, None]
            vectors.mul_(w).masked_fill_(w == 0, 0)  # leaves a vector out even if it has a NaN
        return vectors.mean(dim=0)
