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
from itertools import accumulate

import torch
from torch.nn.functional import pad

from config import option
from method import LocalConfig

BLOCK = 256  # elements
MAGNITUDES = (0.0, *(2.0 ** (e - 7) for e in range(1, 8)))
VALUES = {  # code -> value, in scales
    "e3m0": [*MAGNITUDES, *(-m for m in MAGNITUDES)],  # code: 8 * sign + e
    "log8": [*(2.0 ** (-e / 8) for e in range(255)), 0.0],
}
SIGNS = [[2.0 * (byte >> i & 1) - 1 for i in range(8)] for byte in range(256)]
THRESHOLD = 0.9816  # of two_bits
SMALL = 0.4528
LARGE = 1.510
PACK = 0x0102040810204080  # times 8 bytes of 0 or 1: byte i becomes bit i of the highest byte


def encode(x: torch.Tensor, format: str) -> torch.Tensor:
    """Blocks (B, 256) -> codes and scale of each, (B, bytes) uint8."""
    if format == "none":
        return x.view(torch.uint8)
    count = torch.linalg.vector_norm(x, 0, dim=1, keepdim=True).clamp(min=1)  # not 0
    if format == "sign":
        scale = torch.linalg.vector_norm(x, 1, dim=1, keepdim=True) / count
        codes = pack_bits(x >= 0)
    elif format == "two_bits":
        scale = torch.linalg.vector_norm(x, 2, dim=1, keepdim=True) / count.sqrt()
        signs = pack_bits(x >= 0)
        sizes = pack_bits(x.abs() > THRESHOLD * scale)
        codes = torch.stack([signs, sizes], dim=2).view(len(x), -1)
    else:
        lowest, highest = torch.aminmax(x, dim=1, keepdim=True)  # NaN if there is one
        largest = torch.maximum(highest, -lowest).abs()
        scale = largest / 127 if format == "int8" else largest
        codes = CODES[format](x, scale.float())
    scale = scale.float().where(scale.isfinite(), torch.nan)
    return torch.cat([codes, scale.view(torch.uint8)], dim=1)


def pack_bits(bits):
    """bool (B, n) -> uint8 (B, n / 8), the first of eight in the lowest bit."""
    return bits.view(torch.int64).mul(PACK).bitwise_right_shift_(56).to(torch.uint8)


def int8_codes(x, scale):
    return relative(x, scale).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)


def log8_codes(x, scale):
    steps = relative(x, scale).log2_().mul_(-8).round_().clamp_(0, 254)
    return steps.masked_fill_(x == 0, 255).to(torch.uint8)


def e3m0_codes(x, scale):
    # The upper half of an fp32: sign, 8 bits of exponent, 7 of fraction. Adding 0x40 carries into
    # the exponent from 1.5 on, so the exponent is that of the nearest power of 2.
    upper = relative(x, scale).float().view(torch.int16)[:, 1::2].contiguous()
    magnitude = upper & 0x7FFF
    e = magnitude.clamp(min=0x3C40).add_(0x40).bitwise_right_shift_(7).sub_(120)  # 1 to 7
    e.mul_(magnitude >= 0x3C00).bitwise_or_(upper >> 12 & 8)  # below 2^-7: 0; and the sign
    two = e.view(torch.int32)  # an even element and the odd one after it
    return (two | two >> 12).to(torch.uint8)


def relative(x, scale):
    """x / scale; 0 where scale is 0 or not finite: decode() gets 0 * scale, which is 0 or NaN."""
    return (x / scale).nan_to_num_(0.0, 0.0, 0.0)


FORMATS = ["none", "int8", "e3m0", "two_bits", "sign"]  # of vectors of either sign
CODES = {"int8": int8_codes, "log8": log8_codes, "e3m0": e3m0_codes}


def decode(coded: torch.Tensor, format: str, dtype=torch.float32) -> torch.Tensor:
    """The inverse: codes and scales (B, bytes) uint8 -> blocks (B, 256)."""
    if format == "none":
        return coded.view(dtype)
    codes = coded[:, :-4]
    scale = coded[:, -4:].contiguous().view(torch.float32).to(dtype)
    if format == "int8":
        return codes.view(torch.int8).to(dtype).mul_(scale)
    table = decoded_bytes(format, coded.device, dtype)
    if format == "two_bits":  # a byte of 8 signs, a byte of 8 sizes, ...
        signs = decoded_bytes("sign", coded.device, dtype)
        values = signs.index_select(0, codes[:, ::2].reshape(-1).int())
        values.mul_(table.index_select(0, codes[:, 1::2].reshape(-1).int()))
    else:
        values = table.index_select(0, codes.reshape(-1).int())
    return values.view(-1, BLOCK).mul_(scale)


@functools.cache  # A table is copied to a GPU once, because the host waits for the copy.
def decoded_bytes(format: str, device, dtype) -> torch.Tensor:
    """A table: byte -> its elements, in scales; two_bits: the sizes of 8."""
    signs = torch.tensor(SIGNS, device=device, dtype=dtype)  # (256, 8)
    if format == "sign":
        return signs
    if format == "two_bits":
        return torch.full_like(signs, SMALL).masked_fill_(signs > 0, LARGE)
    values = torch.tensor(VALUES[format], device=device, dtype=dtype)
    if format == "log8":
        return values.view(-1, 1)
    even = values.repeat(len(values))  # the code of an even element is the low half of a byte
    odd = values.repeat_interleave(len(values))
    return torch.stack([even, odd], dim=1)


def bytes_per_element(format: str) -> float:
    return encode(torch.zeros(1, BLOCK), format).numel() / BLOCK


@dataclass
class QuantizedConfig(LocalConfig):
    """Flags of a method that sends a mean over the replicas in one of the formats."""

    quantize: str = option("e3m0", "what is sent", choices=FORMATS)

    def sent_vectors(self, replicas):
        return bytes_per_element(self.quantize) / 4 * super().sent_vectors(replicas)


class MeanInFlight:
    """The mean over the sync group of flat vectors, each cut into blocks of its own. weights: None,
    or a function that returns (M, vectors) with mean 1 over the replicas; it is called after the
    first hop. A vector with weight 0 is left out, also if it contains NaN. errors: None or, for
    error feedback, a vector for each of `vectors`, which is 0 before the first mean: the owner's
    errors, see above. Then `vectors` become the errors of this replica as a sender."""

    def __init__(self, vectors: list, format: str, mesh, weights=None, errors=None):
        self.mesh = mesh
        self.M = mesh.replicas
        self.weights = weights
        self.errors = errors
        self.format = format if self.M > 1 else "none"
        self.dtype = vectors[0].dtype
        self.sizes = [vector.numel() for vector in vectors]
        self.blocks = [max(1, -(-size // BLOCK)) for size in self.sizes]  # a shard may be padding
        self.first_hop = None
        codes = self._encode(vectors)
        if errors:
            for vector, sent in zip(vectors, self._decode(codes)):
                vector.sub_(sent)
        if self.M <= 2:
            return self._gather(codes)
        self.received = torch.empty_like(codes)
        # [sync] all-to-all, codes of the vectors, asynchronous
        self.first_hop = mesh.all_to_all(self.received, codes, mesh.sync)

    def halfway(self):
        """Start the second hop, if there is one. Waits for the first."""
        if self.first_hop:
            self.first_hop.wait()
            self.first_hop = None
            received = self.received.chunk(self.M)
            first = self.mesh.replica * len(received[0])  # number of the first block of the piece
            mean = self._mean(received, first, self._weights())
            own = slice(first, first + len(mean))
            if self.errors:
                mean += self._to_blocks(self.errors)[own]
            for end, size in zip(accumulate(self.blocks), self.sizes):  # padding is 0
                if size % BLOCK and own.start < end <= own.stop:
                    mean[end - 1 - first, size % BLOCK :] = 0
            codes = encode(mean, self.format)
            if self.errors:
                unsent = mean.new_zeros(len(mean) * self.M, BLOCK)
                unsent[own] = mean - decode(codes, self.format, self.dtype)
                self._to_vectors(unsent, self.errors)
            self._gather(codes)

    def wait(self) -> list:
        """The mean of each vector."""
        self.halfway()
        self.handle.wait()
        if self.M > 2:
            return [*self._decode(self.received)]
        received = [copy.split(self.blocks) for copy in self.received.chunk(self.M)]
        firsts = [0, *accumulate(self.blocks)]
        weights = self._weights()
        means = [self._mean(*each, weights) for each in zip(zip(*received), firsts)]
        return [mean.view(-1)[:size] for mean, size in zip(means, self.sizes)]

    def _encode(self, vectors) -> torch.Tensor:
        """One vector at a time. Zeros at the end of each vector and, for two hops, of all."""
        codes = []
        for vector, n in zip(vectors, self.blocks):
            blocks = pad(vector, (0, n * BLOCK - len(vector))).view(n, BLOCK)
            codes.append(encode(blocks, self.format))
        whole_pieces = -sum(self.blocks) % self.M if self.M > 2 else 0
        return pad(torch.cat(codes), (0, 0, 0, whole_pieces))

    def _decode(self, codes):
        """Yields one vector at a time."""
        for own, size in zip(codes[: sum(self.blocks)].split(self.blocks), self.sizes):
            yield decode(own, self.format, self.dtype).view(-1)[:size]

    def _to_blocks(self, vectors) -> torch.Tensor:
        """(blocks, 256), with zeros as in _encode()."""
        blocks = vectors[0].new_zeros(len(self.received), BLOCK)
        for place, vector in zip(self._cut(blocks), vectors):
            place.copy_(vector)
        return blocks

    def _cut(self, blocks) -> list:
        vectors = blocks[: sum(self.blocks)].split(self.blocks)
        return [vector.view(-1)[:size] for vector, size in zip(vectors, self.sizes)]

    def _to_vectors(self, blocks, vectors):
        for vector, values in zip(vectors, self._cut(blocks)):
            vector.copy_(values)

    def _gather(self, own):
        """received <- the codes of all replicas."""
        self.received = own.new_empty(self.M * len(own), own.shape[1])
        self.received.chunk(self.M)[self.mesh.sync.index].copy_(own)
        # [sync] all-gather, codes of each piece's mean (M = 2: of the vectors), asynchronous
        self.handle = self.mesh.all_gather(self.received.view(-1), self.mesh.sync)

    def _weights(self):
        """None, or (M, blocks)."""
        if not self.weights:
            return None
        columns = zip(self.weights().split(1, dim=1), self.blocks)
        weights = torch.cat([w.expand(-1, n) for w, n in columns], dim=1)
        return pad(weights, (0, -weights.shape[1] % self.M))

    def _mean(self, copies, first: int, weights) -> torch.Tensor:
        """The mean of some blocks, number `first` and on, from the codes of all replicas, in rank
        order."""
        total = None
        for replica, codes in enumerate(copies):
            x = decode(codes, self.format, self.dtype)
            if weights is not None:
                w = weights[replica, first : first + len(x), None]
                x = (w * x).where(w > 0, 0)  # weight 0 leaves x out, also if it is not finite
            if total is None:
                total = x
            else:
                total.add_(x)
        return total.div_(self.M)
