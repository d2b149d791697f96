"""The 4 and 8 bit formats. test_methods.py has the mean over replicas in them."""

import pytest
import torch

from reference import rounded
from quantize import decode, encode

FORMATS = ["e3m0", "int8"]


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
