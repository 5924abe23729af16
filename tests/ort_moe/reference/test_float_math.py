"""float_math: a fused multiply-add that is exact, functions within their stated ulps, one order of sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ort_moe.reference import float_math

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
INF = math.inf


def bits(x: object) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def nearest_float32(exact: Fraction) -> np.float32:
    """Rounds to nearest, ties to even, with nothing but exact comparisons."""
    if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        return np.float32(math.copysign(INF, exact))
    guess = np.float32(float(exact))
    if math.isinf(guess):
        guess = np.copysign(np.finfo(np.float32).max, guess)
    near = [np.nextafter(guess, np.float32(-INF)), guess, np.nextafter(guess, np.float32(INF))]
    finite = [value for value in near if math.isfinite(value)]
    return min(finite, key=lambda value: (abs(Fraction(float(value)) - exact), int(bits(value)) & 1))


@given(FLOAT32, FLOAT32, FLOAT32, st.booleans())
@example(1.0 + 2.0**-23, 1.0 - 2.0**-23, -1.0, False)  # the product alone would round away
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-60, False)  # a tie that the addend breaks: double rounding would fail
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, -(2.0**-60), False)
@example(2.0**-100, 2.0**-49, 2.0**-149, False)  # among the subnormals
@example(3.4e38, 2.0, -3.4e38, False)
def test_fma_rounds_once(a: float, b: float, c: float, cancel: bool) -> None:
    if cancel:  # c close to -a*b: most digits go
        with np.errstate(over="ignore"):
            c = float(-(np.float32(a) * np.float32(b)))
        if not math.isfinite(c):
            return
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = float_math.fma(a, b, c)
    if exact:
        assert bits(got) == bits(nearest_float32(exact))
    else:
        assert got == 0.0


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [(INF, 1.0, -INF, math.nan), (INF, 0.0, 1.0, math.nan), (INF, -2.0, 5.0, -INF), (1.0, 2.0, INF, INF)],
)
def test_fma_follows_ieee_at_infinity(a: float, b: float, c: float, expected: float) -> None:
    np.testing.assert_equal(float(float_math.fma(a, b, c)), expected)


def sample() -> np.ndarray:
    """All bfloat16 values, any float32 bits, and where the functions bend."""
    rng = np.random.default_rng(0)
    every_bfloat16 = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    any_bits = rng.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    around_zero = rng.normal(0.0, 1.0, 50_000).astype(np.float32)
    bend = rng.uniform(-110.0, 90.0, 50_000).astype(np.float32)
    values = np.concatenate([every_bfloat16, any_bits, around_zero, bend])
    return values[np.isfinite(values)]


def stable_sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0.0, 1.0 / (1.0 + np.exp(-x)), np.exp(x) / (1.0 + np.exp(x)))


def sqrt_softplus(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.where(x > 20.0, x, np.log1p(np.exp(x))))


@pytest.mark.parametrize(
    ("function", "reference", "domain", "ulps"),
    [
        (float_math.exp, np.exp, lambda x: x, 1.0),
        (float_math.log, np.log, lambda x: np.maximum(np.abs(x), np.finfo(np.float32).tiny), 2.0),
        (float_math.log1p, np.log1p, np.abs, 3.0),
        (float_math.tanh, np.tanh, lambda x: x, 3.0),
        (float_math.sigmoid, stable_sigmoid, lambda x: x, 3.0),
        (float_math.sqrt_softplus, sqrt_softplus, lambda x: x, 3.0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_functions_are_within_their_stated_ulps(
    function: Callable[[np.ndarray], np.ndarray],
    reference: Callable[[np.ndarray], np.ndarray],
    domain: Callable[[np.ndarray], np.ndarray],
    ulps: float,
) -> None:
    x = domain(sample())
    got = function(x)
    with np.errstate(all="ignore"):
        expected = reference(x.astype(np.float64))
        rounded = expected.astype(np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isinf(got), np.isinf(rounded))
    finite = np.isfinite(rounded)
    distance = np.abs(got[finite] - expected[finite]) / np.spacing(np.abs(rounded[finite])).astype(np.float64)
    worst = distance.argmax()
    assert distance[worst] <= ulps, f"{distance[worst]} ulp at {x[finite][worst]!r}"


@pytest.mark.parametrize("function", [float_math.exp, float_math.tanh, float_math.sigmoid])
@pytest.mark.parametrize("start", [-104.0, -88.75, -87.4, -64.05, -17.4, -1.0, -0.6255, -1e-3, 0.1, 0.6245, 3.0, 88.7])
def test_neighbouring_floats_keep_their_order(function: Callable[[np.ndarray], np.ndarray], start: float) -> None:
    steps = np.arange(20_000, dtype=np.uint32)
    ascending = bits(start) + steps if start > 0 else bits(start) - steps
    y = function(ascending.view(np.float32))
    assert (y[:-1] <= y[1:]).all()


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (float_math.exp, [0.0, -0.0, -INF, INF, 89.0, -104.0], [1.0, 1.0, 0.0, INF, INF, 0.0]),
        (float_math.log1p, [0.0, INF, 1e-30], [0.0, INF, 1e-30]),
        (float_math.tanh, [0.0, -INF, INF, 1e-30], [0.0, -1.0, 1.0, 1e-30]),
        (float_math.sigmoid, [0.0, -INF, INF, 40.0], [0.5, 0.0, 1.0, 1.0]),
        (float_math.sqrt_softplus, [-INF, INF, 25.0], [0.0, INF, 5.0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_special_values(function: Callable[[object], np.ndarray], x: list[float], expected: list[float]) -> None:
    np.testing.assert_array_equal(function(x), np.array(expected, np.float32))
    assert np.isnan(function([math.nan])).all()


def test_keys_have_the_total_order() -> None:
    values = np.array([math.nan, -INF, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, INF], np.float32)
    keys = float_math.ordered_key(values).astype(np.int64)
    assert (np.diff(keys) > 0).all()
    assert float_math.ordered_key([-0.0]) == float_math.ordered_key([0.0])
    assert float_math.ordered_key([-math.nan]) == float_math.ordered_key([math.nan]) == 0


@pytest.mark.parametrize("experts", [1, 7, 8, 9, 64, 1000, 1024, 1025, 4096])
def test_ordered_sum_is_the_stated_order(experts: int) -> None:
    values = np.random.default_rng(experts).normal(0.0, 100.0, (3, experts)).astype(np.float32)
    got = float_math.ordered_sum(values)
    for row, row_sum in zip(values, got, strict=True):
        partial = [np.float32(0.0)] * 128
        for e, value in enumerate(row):
            partial[(e // 8) % 128] += value
        for stride in (64, 32, 16, 8, 4, 2, 1):
            partial = [partial[p] + partial[p ^ stride] for p in range(128)]
        assert bits(partial[0]) == bits(row_sum)
        assert len(set(bits(partial).tolist())) == 1
