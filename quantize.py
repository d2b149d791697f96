"""Vectors in 4 or 8 bits, and their mean over the replicas in quantized pieces.

A vector is cut into blocks of 256 consecutive elements. Each block has one fp32 scale s.

    format  bits  s             code                            error at most
    e3m0    4     max |v|       sign, and e in 0..7: 0 means 0, max(|v| / 3, s / 128)
                                else s * 2^(e-7); the nearest
    int8    8     max |v| / 127 round(v / s)                    s / 2

    s = 0: all elements are 0. s not finite: all are NaN, so that a divergence shows.

The mean over M > 2 replicas takes two hops, for M = 2 one:

    start      encode; send piece j to replica j       # [sync] all-to-all of codes and scales
    halfway()  the owner of a piece decodes it from all replicas, its own too, takes the mean in
               rank order, encodes it                  # [sync] all-gather of codes and scales
    wait()     decode all pieces
    M = 2      both send all their codes, decode both  # [sync] all-gather of codes and scales

All replicas decode the same bytes, the owner too, so their results are bit-equal. One replica sends
nothing and quantizes nothing. Format "none" is an all-reduce in the vector's own dtype.

Bytes per rank: 2 (M-1)/M * bytes_per_element() per element (e3m0: 0.516, int8: 1.016).
Error: the mean of the replicas' errors and, for M > 2, the error of encoding the mean.
Source: Streaming DiLoCo, arXiv 2501.18512. Its scaling could not be read; this one is ours.
"""

import torch
from torch.nn.functional import pad

BLOCK = 256  # elements
BLOCK_BYTES = {"e3m0": BLOCK // 2 + 4, "int8": BLOCK + 4, "none": BLOCK * 4}  # codes and scale
# |v| / s is nearest to 2^(e-7) between these bounds; below the first it counts as 0.
BOUNDS = torch.tensor([2.0**-7, *(1.5 * 2.0**-n for n in range(6, 0, -1))])
MAGNITUDES = torch.tensor([0.0, *(2.0 ** (e - 7) for e in range(1, 8))])
VALUES = torch.cat([MAGNITUDES, -MAGNITUDES])  # of the 16 codes: 8 * sign + e


def bytes_per_element(format: str) -> float:
    return BLOCK_BYTES[format] / BLOCK


def encode(x: torch.Tensor, format: str) -> torch.Tensor:
    """Blocks (B, 256) -> codes and scales, (B, BLOCK_BYTES[format]) uint8."""
    largest = x.abs().amax(dim=1, keepdim=True)  # NaN if there is one
    scale = (largest / 127 if format == "int8" else largest).float()
    # s = 0 or not finite: all codes are 0, and decode() gets 0 * s, which is 0 or NaN.
    relative = (x / scale).nan_to_num_(0.0, 0.0, 0.0)
    if format == "int8":
        codes = relative.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        e = torch.bucketize(relative.abs(), BOUNDS.to(x), out_int32=True, right=True)
        codes = e.add_(x.signbit(), alpha=8).to(torch.uint8)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4  # two per byte, the even element low
    return torch.cat([codes, scale.view(torch.uint8)], dim=1)


def decode(coded: torch.Tensor, format: str, dtype=torch.float32) -> torch.Tensor:
    """The inverse: (B, BLOCK_BYTES[format]) uint8 -> blocks (B, 256)."""
    codes, scale = coded[:, :-4], coded[:, -4:].contiguous().view(torch.float32).to(dtype)
    if format == "int8":
        return codes.view(torch.int8).to(dtype).mul_(scale)
    codes = torch.stack([codes & 15, codes >> 4], dim=2).view(-1, BLOCK)
    return VALUES.to(coded.device, dtype)[codes.int()].mul_(scale)


def weigh(x, weight):
    """weight * x. Weight 0 leaves x out, also if it is not finite."""
    return (weight * x).where(weight > 0, 0.0)


class MeanInFlight:
    """The mean over the sync group of flat vectors, for example of some layers. Blocks do not cross
    from one vector into the next. weights: None, or a function that returns (M, vectors) with mean
    1 over the replicas; it is called after the first hop. A vector with weight 0 is left out, also
    if it contains NaN."""

    def __init__(self, vectors: list, format: str, mesh, weights=None):
        self.mesh, self.M, self.dtype = mesh, mesh.replicas, vectors[0].dtype
        self.weights = weights
        self.format, self.hops_left = format if self.M > 1 else "none", 1
        self.sizes = [vector.numel() for vector in vectors]
        if self.format == "none":
            self.whole, self.hops_left = torch.cat(vectors), 2 if weights else 1
            if not weights:
                self._sum()
            return
        self.blocks = [-(-size // BLOCK) for size in self.sizes]
        padded = [pad(v, (0, n * BLOCK - len(v))) for v, n in zip(vectors, self.blocks)]
        codes = encode(torch.cat(padded).view(-1, BLOCK), format)
        if self.M == 2:
            self._gather(codes)
        else:
            codes = pad(codes, (0, 0, 0, -len(codes) % self.M))  # whole blocks in each piece
            self.received, self.hops_left = torch.empty_like(codes), 2
            # [sync] all-to-all, codes of the vectors, asynchronous
            self.handle = mesh.all_to_all(self.received, codes, mesh.sync)

    def halfway(self):
        """Start the second hop, if there is one. Waits for the first."""
        if self.hops_left == 1:
            return
        self.hops_left = 1
        if self.format == "none":
            own = self.weights()[self.mesh.replica]
            for vector, weight in zip(self.whole.split(self.sizes), own):
                vector.copy_(weigh(vector, weight))
            self._sum()
        else:
            self.handle.wait()
            mean = self._mean(self.received.chunk(self.M), self.mesh.replica)
            self._gather(encode(mean, self.format))

    def wait(self) -> list:
        """The mean of each vector."""
        self.halfway()
        self.handle.wait()
        if self.format == "none":
            return list(self.whole.split(self.sizes))
        if self.M == 2:
            mean = self._mean(self.received.chunk(2), piece=0)
        else:
            mean = decode(self.received, self.format, self.dtype)
        vectors = mean[: sum(self.blocks)].split(self.blocks)
        return [vector.view(-1)[:size] for vector, size in zip(vectors, self.sizes)]

    def _gather(self, own):
        """received <- the codes of all replicas."""
        self.received = own.new_empty(self.M * len(own), own.shape[1])
        self.received.chunk(self.M)[self.mesh.sync.index].copy_(own)
        # [sync] all-gather, codes of each piece's mean (M = 2: of the vectors), asynchronous
        self.handle = self.mesh.all_gather(self.received.view(-1), self.mesh.sync)

    def _sum(self):
        self.whole.div_(self.M)
        # [sync] all-reduce, the vectors in their dtype, asynchronous
        self.handle = self.mesh.all_reduce(self.whole, self.mesh.sync)

    def _mean(self, copies, piece: int) -> torch.Tensor:
        """The mean of one piece over all replicas, from their codes, in rank order."""
        copies = [decode(codes, self.format, self.dtype) for codes in copies]
        if self.weights:
            columns = zip(self.weights().split(1, dim=1), self.blocks)
            weights = torch.cat([w.expand(-1, n) for w, n in columns], dim=1)  # (M, blocks)
            weights = pad(weights, (0, -weights.shape[1] % self.M))
            first, rows = piece * len(copies[0]), len(copies[0])
            copies = [weigh(x, w[first : first + rows, None]) for x, w in zip(copies, weights)]
        return sum(copies[1:], copies[0]).div_(len(copies))
