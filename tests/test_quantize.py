"""The formats of quantized vectors, and error feedback. test_methods.py has the mean over replicas
in all formats."""

from types import SimpleNamespace

import pytest
import torch

from mesh import Mesh
from ranks import CPU, run_ranks
from plain import rounded
from relatives.quantize import MeanInFlight, decode, encode
from rows import each_row

FORMATS = ["e3m0", "int8"]  # sign, two_bits and log8: below


def drawn(*shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def block(*first, dtype=torch.float32):
    """256 elements: these and zeros."""
    v = torch.zeros(1, 256, dtype=dtype)
    v[0, : len(first)] = torch.tensor(first)
    return v


def Q(v, format):
    return decode(encode(v, format), format, v.dtype)


def assert_equals_reference(v, format, rtol):
    for before, after in zip(v.double(), Q(v, format).double()):
        torch.testing.assert_close(after, rounded(before, format), rtol=rtol, atol=0)


def test_e3m0_codes_by_hand():
    code = encode(block(-4.0, 3.0, 2.99, 1.5, 0.07, 0.03125, 0.031, -0.0625), "e3m0")
    assert code.shape == (1, 132)
    # sign * 8 + e: 15, 7, 6, 6, 1, 1, 0, 9. Two are a byte, the first one in the lower bits.
    assert code[0, :4].tolist() == [15 + 7 * 16, 6 + 6 * 16, 1 + 1 * 16, 0 + 9 * 16]
    assert not code[0, 4:128].any()
    scale = code[0, 128:].view(torch.float32)
    assert scale.item() == 4.0
    expected = [-4.0, 4.0, 2.0, 2.0, 0.0625, 0.0625, 0.0, -0.0625]
    assert decode(code, "e3m0")[0, :8].tolist() == expected


def test_int8_codes_by_hand():
    code = encode(block(-254.0, 254.0, 3.1, -2.9, 0.99), "int8")
    assert code.shape == (1, 260)
    assert code[0, :5].view(torch.int8).tolist() == [-127, 127, 2, -1, 0]
    assert code[0, 256:].view(torch.float32).item() == 2.0
    assert decode(code, "int8")[0, :5].tolist() == [-254.0, 254.0, 4.0, -2.0, 0.0]


@each_row("dtype", [torch.float32, torch.float64])
@each_row("format", FORMATS)
def test_rounding_is_nearest_bounded_and_symmetric(format, dtype):
    powers = torch.arange(-20, 20)[:, None].to(dtype)
    v = drawn(40, 256, dtype=dtype) * 10.0**powers
    q = Q(v, format)
    assert q.dtype == dtype
    assert_equals_reference(v, format, rtol=1e-6)

    s = v.abs().amax(dim=1, keepdim=True)
    error = (q - v).abs()
    bounds = {"int8": s / 127 / 2, "e3m0": torch.maximum(v.abs() / 3, s / 128)}
    assert (error <= bounds[format] * (1 + 1e-6)).all()
    # of normally distributed elements
    relative_error = (error / s).norm() / (v / s).norm()
    expected = {"e3m0": 0.195, "int8": 0.0068}
    assert relative_error.item() == pytest.approx(expected[format], rel=0.05)

    assert torch.equal(Q(-v, format), -q)
    assert torch.equal(Q(8 * v, format), 8 * q)
    if format == "e3m0":
        assert torch.equal(Q(q, format), q)


@each_row("format", FORMATS)
def test_zero_blocks_stay_zero_and_divergence_shows(format):
    v = drawn(5, 256)
    v[0] = 0.0
    v[1, 3] = torch.nan
    v[2, 200] = torch.inf
    v[3, 0] = 1e300  # too large for fp32
    q = Q(v, format)
    assert (q[0] == 0).all()
    assert q[1:4].isnan().all()
    assert q[4].isfinite().all()
    smallest = torch.full((1, 256), 2e-43)  # its scale has two significant bits at most
    assert (Q(smallest, format) >= 0).all()
    assert (Q(-smallest, format) <= 0).all()


def test_sign_codes_by_hand():
    code = encode(block(-3.0, 1.0, 0.0, 2.0, -6.0), "sign")
    assert code.shape == (1, 36)
    assert code[0, :32].tolist() == [0b11101110, *[255] * 31]
    # the scale is the mean of the four sizes that are not 0
    assert decode(code, "sign")[0, :6].tolist() == [-3.0, 3.0, 3.0, 3.0, -3.0, 3.0]


@each_row("format", ["sign", "two_bits", "log8"])
def test_coarse_formats_show_a_divergence_and_keep_zero_blocks(format):
    assert (Q(block(), format) == 0).all()
    for wrong in torch.nan, torch.inf:
        assert Q(block(3.0, 1.0, wrong), format).isnan().all()
    too_large = torch.full((1, 256), 1e300, dtype=torch.float64)  # for an fp32 scale
    assert Q(too_large, format).isnan().all()


def test_two_bits_codes_by_hand():
    code = encode(block(-3.0, 1.0, 0.0, 2.0, -6.0, 0.0, 0.0, 0.0, 5.0), "two_bits")
    assert code.shape == (1, 68)
    assert code[0, :4].tolist() == [0b01010100, 0b01010110, 0b01010111, 0b01010101]
    rms = (75 / 5) ** 0.5  # of the five that are not 0
    sizes = torch.tensor([-0.4528, 0.4528, 0.4528, 0.4528, -1.51, 0.4528, 0.4528, 0.4528, 1.51])
    torch.testing.assert_close(decode(code, "two_bits")[0, :9], sizes * rms)


def test_two_bits_are_nearest_levels_with_a_mean_square_error_of_12_percent():
    v = drawn(40, 256)
    assert_equals_reference(v, "two_bits", rtol=1e-6)
    relative_error = (Q(v, "two_bits") - v).norm() / v.norm()
    assert relative_error.item() ** 2 == pytest.approx(0.1175, rel=0.02)


def test_log8_codes_by_hand():
    code = encode(block(8.0, 4.0, 4.3, 1e-30, 0.0, dtype=torch.float64), "log8")
    assert code.shape == (1, 260)
    assert code[0, :5].tolist() == [0, 8, 7, 254, 255]


def test_log8_is_near_and_nothing_becomes_zero():
    v = drawn(40, 256).abs() * 10.0 ** torch.arange(-20, 20)[:, None]
    v[:, ::7] = 0
    q = Q(v, "log8")
    assert torch.equal(q > 0, v > 0)
    is_large = v > v.amax(dim=1, keepdim=True) / 2**31
    error = (q / v - 1).abs()
    assert (error[is_large] < 0.0443).all()
    assert_equals_reference(v, "log8", rtol=1e-12)


def feed_back(rounds, size):
    """The sum of the means of the same vector in all rounds; this rank's vector, and what it has
    kept as a sender and as an owner."""
    mesh = Mesh(1, CPU)
    generator = torch.Generator().manual_seed(mesh.rank)
    value = torch.randn(size, generator=generator).double()
    e = torch.zeros_like(value)
    E = torch.zeros_like(value)
    total = torch.zeros_like(value)
    for _ in range(rounds):
        e += value
        total += MeanInFlight([e], "sign", mesh, [E]).wait()
    return total, value, e, E


@each_row("size", [700, 16, 1300])
@each_row("ranks", [2, 3, 4])
def test_error_feedback_loses_nothing(ranks, size):
    """What all have added up and what is left is what was to be sent, to rounding."""
    totals, values, e, E = zip(*run_ranks(ranks, feed_back, 5, size))
    to_send = 5 * sum(values) / ranks
    left = sum(e) / ranks + sum(E)
    torch.testing.assert_close(totals[0] + left, to_send, rtol=1e-12, atol=1e-12)
    assert left.abs().max() > 1e-3  # the codes alone lose something
    for total in totals:
        assert torch.equal(total, totals[0])
    owners = (torch.stack(E) != 0).sum(dim=0)  # of each element
    assert (owners <= 1).all()
    assert owners.any() == (ranks > 2)


def mesh_of_equals(replicas, replica):
    """All replicas have the vectors of this one, so what it receives it has sent."""

    def all_to_all(received, pieces, group):
        received.copy_(pieces[replica].expand_as(received))
        return SimpleNamespace(wait=lambda: None)

    def all_gather(whole, group):
        return SimpleNamespace(wait=lambda: None)

    return SimpleNamespace(
        replicas=replicas,
        replica=replica,
        sync_group=None,
        all_to_all=all_to_all,
        all_gather=all_gather,
    )


@each_row("replica", [0, 1, 2])
def test_owner_forgets_errors_beside_its_piece(replica):
    """After a resume with other replicas its piece is another one."""
    size = 700
    E = torch.ones(size).double()
    MeanInFlight([drawn(size)], "sign", mesh_of_equals(3, replica), [E]).halfway()
    first = 256 * replica
    assert not E[:first].any()
    assert E[first : first + 256].all()
    assert not E[first + 256 :].any()


@each_row("format", ["none", "sign", "two_bits", "e3m0", "int8"])
@each_row("replicas", [1, 2, 3])
def test_mean_of_a_shard_that_is_all_padding_is_empty(replicas, format):
    empty = torch.zeros(0)
    vectors = [drawn(300, dtype=torch.float32), empty]
    errors = [torch.zeros(300), torch.zeros(0)]
    mean = MeanInFlight(vectors, format, mesh_of_equals(replicas, 0), errors)
    assert len(mean.wait(0)) == 300
    assert len(mean.wait(1)) == 0
