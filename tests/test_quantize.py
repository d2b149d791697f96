"""The 4 and 8 bit formats. test_methods.py has the mean over replicas in them."""

import pytest
import torch

from mesh import Mesh
from ranks import CPU, run_ranks
from reference import rounded
from relatives.quantize import MeanInFlight, decode, encode

FORMATS = ["e3m0", "int8"]  # sign and log8: below


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def Q(v, format):
    return decode(encode(v, format), format, v.dtype)


def test_e3m0_codes_by_hand():
    v = torch.zeros(1, 256)
    v[0, :8] = torch.tensor([-4.0, 3.0, 2.99, 1.5, 0.07, 0.03125, 0.031, -0.0625])
    code = encode(v, "e3m0")
    # sign * 8 + e, two per byte, the even element low; then the scale
    codes = [15, 7, 6, 6, 1, 1, 0, 9]
    assert code[0, :4].tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2])]
    assert code.shape == (1, 132) and not code[0, 4:128].any()
    assert code[0, 128:].view(torch.float32).item() == 4.0
    expected = [-4.0, 4.0, 2.0, 2.0, 0.0625, 0.0625, 0.0, -0.0625]
    assert decode(code, "e3m0")[0, :8].tolist() == expected


def test_int8_codes_by_hand():
    v = torch.zeros(1, 256)
    v[0, :5] = torch.tensor([-254.0, 254.0, 3.1, -2.9, 0.99])
    code = encode(v, "int8")
    assert code.shape == (1, 260)
    assert code[0, :5].view(torch.int8).tolist() == [-127, 127, 2, -1, 0]
    assert code[0, 256:].view(torch.float32).item() == 2.0
    assert decode(code, "int8")[0, :5].tolist() == [-254.0, 254.0, 4.0, -2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_rounding_is_nearest_bounded_and_symmetric(format, dtype):
    v = drawn(40, 256, dtype=dtype) * 10.0 ** torch.arange(-20, 20)[:, None].to(dtype)
    q = Q(v, format)
    assert q.dtype == dtype
    for block, decoded in zip(v.double(), q.double()):
        torch.testing.assert_close(decoded, rounded(block, format), rtol=1e-6, atol=0)
    s, error = v.abs().amax(dim=1, keepdim=True), (q - v).abs()
    bound = s / 127 / 2 if format == "int8" else torch.maximum(v.abs() / 3, s / 128)
    assert (error <= bound * (1 + 1e-6)).all()
    rms = ((error / s).norm() / (v / s).norm()).item()  # of normally distributed elements
    assert rms == pytest.approx({"e3m0": 0.195, "int8": 0.0068}[format], rel=0.05)
    assert torch.equal(Q(-v, format), -q) and torch.equal(Q(8 * v, format), 8 * q)
    if format == "e3m0":
        assert torch.equal(Q(q, format), q)


@pytest.mark.parametrize("format", FORMATS)
def test_zero_blocks_stay_zero_and_divergence_shows(format):
    v = drawn(5, 256)
    v[0], v[1, 3], v[2, 200], v[3, 0] = 0.0, torch.nan, torch.inf, 1e300  # too large for fp32
    q = Q(v, format)
    assert (q[0] == 0).all() and q[1:4].isnan().all() and q[4].isfinite().all()
    smallest = torch.full((1, 256), 2e-43)  # its scale has two significant bits at most
    assert (Q(smallest, format) >= 0).all() and (Q(-smallest, format) <= 0).all()


def test_sign_codes_by_hand():
    v = torch.zeros(1, 256)
    v[0, :5] = torch.tensor([-3.0, 1.0, 0.0, 2.0, -6.0])
    code = encode(v, "sign")
    assert code.shape == (1, 36) and code[0, :32].tolist() == [0b11101110, *[255] * 31]
    assert decode(code, "sign")[0, :6].tolist() == [-3.0, 3.0, 3.0, 3.0, -3.0, 3.0]  # mean of four
    assert (Q(torch.zeros(1, 256), "sign") == 0).all()
    for wrong in torch.nan, torch.inf:
        v[0, 7] = wrong
        assert all(Q(v.abs(), form).isnan().all() for form in ("sign", "two_bits", "log8"))


def test_two_bits_codes_by_hand():
    v = torch.zeros(1, 256)
    v[0, :9] = torch.tensor([-3.0, 1.0, 0.0, 2.0, -6.0, 0.0, 0.0, 0.0, 5.0])
    code, rms = encode(v, "two_bits"), (75 / 5) ** 0.5  # of the five that are not 0
    assert code.shape == (1, 68)
    assert code[0, :4].tolist() == [0b01010100, 0b01010110, 0b01010111, 0b01010101]
    decoded = decode(code, "two_bits")[0, :9]
    sizes = torch.tensor([-0.4528, 0.4528, 0.4528, 0.4528, -1.51, 0.4528, 0.4528, 0.4528, 1.51])
    torch.testing.assert_close(decoded, sizes * rms)
    normal = drawn(40, 256)
    q = Q(normal, "two_bits")
    for block, decoded in zip(normal, q):
        torch.testing.assert_close(decoded, rounded(block, "two_bits"), rtol=1e-6, atol=0)
    assert ((q - normal).norm() / normal.norm()).item() ** 2 == pytest.approx(0.1175, rel=0.02)
    assert (Q(torch.zeros(1, 256), "two_bits") == 0).all()


def test_log8_codes_by_hand_and_nothing_becomes_zero():
    v = torch.zeros(1, 256).double()
    v[0, :5] = torch.tensor([8.0, 4.0, 4.3, 1e-30, 0.0])
    code = encode(v, "log8")
    assert code.shape == (1, 260) and code[0, :5].tolist() == [0, 8, 7, 254, 255]
    drawn_v = drawn(40, 256).abs() * 10.0 ** torch.arange(-20, 20)[:, None]
    drawn_v[:, ::7] = 0
    q, s = Q(drawn_v, "log8"), drawn_v.amax(dim=1, keepdim=True)
    assert torch.equal(q > 0, drawn_v > 0)
    large = drawn_v > s / 2**31
    assert ((q / drawn_v - 1).abs()[large] < 0.0443).all()
    for block, decoded in zip(drawn_v, q):
        torch.testing.assert_close(decoded, rounded(block, "log8"), rtol=1e-12, atol=0)


def feed_back(rounds, sizes):
    """Means of the same vectors, and what each rank sent and kept."""
    mesh = Mesh(1, CPU)
    generator = torch.Generator().manual_seed(mesh.rank)
    values = [torch.randn(size, generator=generator).double() for size in sizes]
    e, E = ([torch.zeros(size).double() for size in sizes] for _ in range(2))
    total = [torch.zeros(size).double() for size in sizes]
    for _ in range(rounds):
        z = [error.add_(value) for error, value in zip(e, values)]
        mean = MeanInFlight(z, "sign", mesh, errors=E).wait()
        total = [a + b for a, b in zip(total, mean)]
    return values, total, e, E


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_error_feedback_loses_nothing(ranks):
    """What all have added up and what is left is what was to be sent, to rounding."""
    results = run_ranks(ranks, feed_back, 5, (700, 16, 300))
    for l in range(3):
        wanted = sum(5 * values[l] for values, *_ in results) / ranks
        left = sum(e[l] for _, _, e, _ in results) / ranks + sum(E[l] for *_, E in results)
        torch.testing.assert_close(results[0][1][l] + left, wanted, rtol=1e-12, atol=1e-12)
        assert left.abs().max() > 1e-3  # the codes alone lose something
        assert all(torch.equal(total[l], results[0][1][l]) for _, total, _, _ in results)
        owners = torch.stack([E[l] != 0 for *_, E in results]).sum(dim=0)
        assert (owners <= 1).all() and owners.any() == (ranks > 2)
