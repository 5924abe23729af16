"""Float32 arithmetic with one answer everywhere: the NumPy twin of custom_ops/kernels/common/float_math.h.

Each function is the same sequence of IEEE-754 add, multiply, fused multiply-add, divide and square root as in the
header, so it returns the same bits (NaNs compare as NaN, not by payload). Polynomials: Cephes single precision (expf,
logf, tanhf).

All take and return float32 arrays of one shape; scalars broadcast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

_F = np.float32
_F64_INFINITY = np.float64(np.inf)
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def _ieee(function: _Decorated) -> _Decorated:
    """Lets overflow, invalid and division by zero give what IEEE-754 says, without warnings."""

    @functools.wraps(function)
    def quiet(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return quiet  # type: ignore[return-value]


@_ieee
def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32Array:
    """a * b + c with one rounding.

    The product of two float32 is exact in float64. The float64 sum is rounded to odd (Boldo & Melquiond, "Emulation of
    FMA and correctly rounded sums", 2008), with the error term from Knuth's TwoSum, so that the rounding to float32 is
    right.
    """
    product = np.multiply(np.asarray(a, np.float32), np.asarray(b, np.float32), dtype=np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = np.asarray(product + addend)
    share = total - product
    error = (product - (total - share)) + (addend - share)
    inexact = np.isfinite(total) & (error != 0.0)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    odd_neighbour = np.nextafter(total, np.copysign(_F64_INFINITY, error))
    return np.where(inexact & even, odd_neighbour, total).astype(np.float32)


def power_of_two(n: npt.NDArray[np.int32]) -> Float32Array:
    """2^n for n in [-126, 127]."""
    return ((n + np.int32(127)) << np.int32(23)).view(np.float32)


@_ieee
def exp(x: npt.ArrayLike) -> Float32Array:
    """e^x, within 1 ulp; subnormal results are rounded once, overflow gives +inf, NaN stays NaN."""
    x = np.asarray(x, np.float32)
    overflows = x > _F(88.7228393)
    underflows = x < _F(-103.972084)
    inside = np.where(np.isnan(x) | overflows | underflows, _F(0.0), x)

    round_magic = _F(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
    n = (inside * _F(1.44269504) + round_magic) - round_magic
    r = fma(n, _F(2.12194440e-4), fma(n, _F(-0.693359375), inside))
    p = np.full_like(r, _F(1.9875691500e-4))
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, _F(coefficient))
    p = fma(p, r * r, r) + _F(1.0)
    exponent = n.astype(np.int32)
    half = np.trunc(n * _F(0.5)).astype(np.int32)
    result = (p * power_of_two(half)) * power_of_two(exponent - half)

    result = np.where(overflows, _F(np.inf), np.where(underflows, _F(0.0), result))
    return np.where(np.isnan(x), x, result)


@_ieee
def log(x: npt.ArrayLike) -> Float32Array:
    """Natural logarithm of normal, positive, finite x, within 2 ulp; other values give no meaningful result."""
    bits = np.asarray(x, np.float32).view(np.int32)
    exponent = (bits >> np.int32(23)) - np.int32(126)
    m = ((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(np.float32)  # in [0.5, 1)
    low = m < _F(0.707106781)
    exponent = exponent - low.astype(np.int32)
    m = np.where(low, m + m, m)
    r = m - _F(1.0)
    z = r * r
    p = np.full_like(r, _F(7.0376836292e-2))
    for coefficient in (
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    ):
        p = fma(p, r, _F(coefficient))
    p = (p * r) * z
    n = exponent.astype(np.float32)
    p = fma(n, _F(-2.12194440e-4), p)
    p = fma(z, _F(-0.5), p)
    return fma(n, _F(0.693359375), r + p)


@_ieee
def log1p(y: npt.ArrayLike) -> Float32Array:
    """log(1 + y) for y >= 0, within 3 ulp: Kahan's correction of the rounding of 1 + y."""
    y = np.asarray(y, np.float32)
    u = y + _F(1.0)
    regular = (u != _F(1.0)) & (u < _F(np.inf))
    inside = np.where(regular, u, _F(2.0))
    corrected = log(inside) * (y / (inside - _F(1.0)))
    return np.where(regular, corrected, np.where(u == _F(1.0), y, u))


@_ieee
def tanh(x: npt.ArrayLike) -> Float32Array:
    """tanh(x), within 3 ulp; the sign of a zero is not kept."""
    x = np.asarray(x, np.float32)
    a = np.abs(x)
    z = x * x
    p = np.full_like(x, _F(-5.70498872745e-3))
    for coefficient in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fma(p, z, _F(coefficient))
    near_zero = fma(p * z, x, x)
    e = exp(_F(-2.0) * a)
    t = (_F(1.0) - e) / (_F(1.0) + e)
    return np.where(a < _F(0.625), near_zero, np.where(x < _F(0.0), -t, t))


@_ieee
def sigmoid(x: npt.ArrayLike) -> Float32Array:
    """1 / (1 + e^-x), within 3 ulp; far below zero it is e^x, which does not vanish before the format ends."""
    x = np.asarray(x, np.float32)
    tail = x < _F(-64.0)
    e = exp(np.where(tail, x, -x))
    return np.where(tail, e, _F(1.0) / (_F(1.0) + e))


@_ieee
def sqrt_softplus(x: npt.ArrayLike) -> Float32Array:
    """sqrt(log(1 + e^x)), within 3 ulp, the softplus linear above 20 as the frameworks have it.

    Far below zero it is e^(x/2), which keeps the digits that e^x would lose among the subnormals.
    """
    x = np.asarray(x, np.float32)
    tail = x < _F(-64.0)
    e = exp(np.where(tail, x * _F(0.5), x))
    return np.where(tail, e, np.sqrt(np.where(x > _F(20.0), x, log1p(e))))


@_ieee
def ordered_key(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Ranking keys as unsigned integers in their total order: +inf > finite > -inf > NaN, -0 = +0."""
    x = np.asarray(x, np.float32)
    bits = (x + _F(0.0)).view(np.uint32)  # -0 + 0 = +0
    negative = (bits & np.uint32(0x80000000)) != 0
    return np.where(np.isnan(x), np.uint32(0), np.where(negative, ~bits, bits | np.uint32(0x80000000)))


PARTIAL_SUMS = 128
"""Partial sums that every sum over experts is split into."""

ELEMENTS_TOGETHER = 8
"""Neighbouring elements that go into one partial sum: 16 bytes of half precision."""


@_ieee
def ordered_sum(values: Float32Array) -> Float32Array:
    """Sums over the last axis, the experts, in the one order that every path and device has.

    Element e goes into partial sum (e / 8) mod 128, each of which starts at +0 and runs in ascending e; a butterfly
    with strides 64, 32, 16, 8, 4, 2, 1 then adds the partial sums.

    Args:
        values: (..., E) float32. What does not take part in the sum is +0.

    Returns:
        (...) float32.
    """
    partial = np.zeros((*values.shape[:-1], PARTIAL_SUMS), np.float32)
    for step in _steps(values):
        partial = partial + step
    return _butterfly(partial)


def ordered_dot(a: Float32Array, b: Float32Array) -> Float32Array:
    """Sums a * b over the last axis in the order of `ordered_sum`, each step one fused multiply-add.

    Args:
        a: (..., N) float32.
        b: (..., N) float32; the leading axes broadcast.

    Returns:
        (...) float32.
    """
    partial = np.zeros((*np.broadcast_shapes(a.shape, b.shape)[:-1], PARTIAL_SUMS), np.float32)
    for step in zip(_steps(a), _steps(b), strict=True):
        partial = fma(*step, partial)
    return _butterfly(partial)


def _steps(values: Float32Array) -> Iterator[Float32Array]:
    """What the 128 partial sums add at each step, (..., 128); +0 past the end."""
    *leading, size = values.shape
    lap = PARTIAL_SUMS * ELEMENTS_TOGETHER
    laps = -(-size // lap)
    padded = np.zeros((*leading, laps * lap), np.float32)
    padded[..., :size] = values
    padded = padded.reshape(*leading, laps, PARTIAL_SUMS, ELEMENTS_TOGETHER)
    for i in range(laps):
        for j in range(ELEMENTS_TOGETHER):
            yield padded[..., i, :, j]


def _butterfly(partial: Float32Array) -> Float32Array:
    width = PARTIAL_SUMS
    while width > 1:
        width //= 2
        partial = partial[..., :width] + partial[..., width : 2 * width]
    return np.asarray(partial[..., 0])
