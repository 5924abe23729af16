"""Every activation in the ways that it is spelled, and those that FusedExperts has not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.rewrites.experts.experts_models import FC1, INNER, Experts, assert_fuses, assert_stays

CONSTANTS: dict[str, Any] = {
    "half": 0.5,
    "one_float": 1.0,
    "two_float": 2.0,
    "three_float": 3.0,
    "zero_float": 0.0,
    "root_2": math.sqrt(2.0),
    "inverse_root_2": math.sqrt(0.5),
    "root_2_pi": math.sqrt(2.0 / math.pi),
    "cubic": 0.044715,
    "alpha": 1.702,
    "limit": 0.5,
    "low": -0.5,
    "other_limit": 0.25,
    "start": np.array([0], np.int64),
    "odd": np.array([1], np.int64),
    "middle": np.array([INNER], np.int64),
    "end": np.array([np.iinfo(np.int64).max], np.int64),
    "two_int": np.array([2], np.int64),
}

# Each reads `g` and writes `a`.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("s = Sigmoid (g)\n a = Mul (s, g)", {"activation": "silu", "alpha": 1.0}),
    "quick gelu": (
        "scaled = Mul (alpha, g)\n s = Sigmoid (scaled)\n a = Mul (g, s)",
        {"activation": "silu", "alpha": pytest.approx(1.702)},
    ),
    "QuickGelu": (
        "a = com.microsoft.QuickGelu <alpha = 1.5> (g)",
        {"activation": "silu", "alpha": 1.5},
    ),
    "contrib Gelu": ("a = com.microsoft.Gelu (g)", {"activation": "gelu"}),
    "gelu": (
        "d = Div (g, root_2)\n e = Erf (d)\n e1 = Add (e, one_float)\n m = Mul (g, e1)\n a = Mul (m, half)",
        {"activation": "gelu"},
    ),
    "gelu, half of x": (
        "h = Mul (half, g)\n d = Mul (inverse_root_2, g)\n e = Erf (d)\n e1 = Add (one_float, e)\n a = Mul (h, e1)",
        {"activation": "gelu"},
    ),
    "Gelu": ("a = Gelu (g)", {"activation": "gelu"}),
    "gelu_tanh": (
        """cube = Pow (g, three_float)
        c = Mul (cube, cubic)
        inner = Add (g, c)
        t = Mul (inner, root_2_pi)
        tanh = Tanh (t)
        t1 = Add (tanh, one_float)
        h = Mul (g, half)
        a = Mul (h, t1)""",
        {"activation": "gelu_tanh"},
    ),
    "gelu_tanh, by squares": (
        """square = Mul (g, g)
        c = Mul (square, cubic)
        c1 = Add (c, one_float)
        inner = Mul (g, c1)
        t = Mul (root_2_pi, inner)
        tanh = Tanh (t)
        t1 = Add (one_float, tanh)
        m = Mul (g, t1)
        a = Div (m, two_float)""",
        {"activation": "gelu_tanh"},
    ),
    "Gelu tanh": ('a = Gelu <approximate = "tanh"> (g)', {"activation": "gelu_tanh"}),
    "Relu": ("a = Relu (g)", {"activation": "relu"}),
    "Max": ("a = Max (g, zero_float)", {"activation": "relu"}),
    "Clip": ("a = Clip (g, zero_float)", {"activation": "relu"}),
    "relu2": ("r = Relu (g)\n a = Pow (r, two_float)", {"activation": "relu2"}),
    "relu2, by itself": ("r = Relu (g)\n a = Mul (r, r)", {"activation": "relu2"}),
}

HALVES = {
    "concat": "g, u = Split <axis = 1, num_outputs = 2> (made1)",
    "slices": "g = Slice (made1, start, middle, minus1)\n u = Slice (made1, middle, end, minus1)",
    "interleaved": "g = Slice (made1, start, end, minus1, two_int)\n u = Slice (made1, odd, end, minus1, two_int)",
    "chunks": """
        shape = Shape (made1)
        width = Gather (shape, minus1)
        more = Add (width, odd)
        chunk = Div (more, two_int)
        whole = Mul (chunk, two_int)
        g = Slice (made1, start, chunk, minus1)
        u = Slice (made1, chunk, whole, minus1)""",
}


def experts(activation: str, **changes: Any) -> Experts:
    imports = {"com.microsoft": 1} if "com.microsoft" in activation else {}
    return Experts(activation=f"\n{activation}", constants=CONSTANTS, imports=imports, **changes)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name: str) -> None:
    text, expected = ACTIVATIONS[name]
    assert_fuses(experts(f"{HALVES['concat']}\n{text}\n active = Mul (u, a)"), {**expected, "gated": 1})


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_not_gated(name: str) -> None:
    text, expected = ACTIVATIONS[name]
    plain = f"g = Identity (made1)\n {text}\n active = Identity (a)"
    assert_fuses(experts(plain, gated=False), {**expected, "gated": 0, "beta": 0.0, "limit": 0.0})


@pytest.mark.parametrize("halves", HALVES)
def test_halves(halves: str) -> None:
    layout = "interleaved" if halves == "interleaved" else "concat"
    text = f"{HALVES[halves]}\n{ACTIVATIONS['silu'][0]}\n active = Mul (a, u)"
    assert_fuses(experts(text), {"activation": "silu", "gate_layout": layout})


def test_no_activation() -> None:
    assert_fuses(experts("active = Identity (made1)", gated=False), {"activation": "identity", "gated": 0})
    assert_fuses(experts(f"{HALVES['concat']}\n active = Mul (g, u)"), {"activation": "identity", "gated": 1})


LIMITS = {
    "Clip": "g = Clip (g0, , limit)\n u = Clip (u0, low, limit)",
    "Min and Max": "g = Min (g0, limit)\n u1 = Max (u0, low)\n u = Min (limit, u1)",
}


@pytest.mark.parametrize("limits", LIMITS)
def test_limits(limits: str) -> None:
    """As GPT-OSS has them, with its slope and the one that is added to the value."""
    halves = HALVES["interleaved"].replace("g =", "g0 =").replace("u =", "u0 =")
    text = f"""{halves}
        {LIMITS[limits]}
        {ACTIVATIONS["quick gelu"][0]}
        u_plus = Add (u, one_float)
        active = Mul (u_plus, a)"""
    expected = {"gate_layout": "interleaved", "limit": 0.5, "beta": 1.0, "alpha": pytest.approx(1.702)}
    assert_fuses(experts(text), expected)


def test_constants_rounded_to_half_precision() -> None:
    text = f"{HALVES['concat']}\n{ACTIVATIONS['gelu_tanh, by squares'][0]}\n active = Mul (a, u)"
    assert_fuses(experts(text, dtype="float16"), {"activation": "gelu_tanh"}, rtol=6e-3)


def test_activation_in_float32() -> None:
    text = """g16, u = Split <axis = 1, num_outputs = 2> (made1)
        g = Cast <to = 1> (g16)
        s = Sigmoid (g)
        a = Mul (s, g)
        a16 = Cast <to = 10> (a)
        active = Mul (a16, u)"""
    assert_fuses(experts(text, dtype="float16"), {"activation": "silu"}, rtol=4e-3)


# Each reads `g` and `u` and writes `active`.
STAYING: dict[str, tuple[str, str]] = {
    "tanh alone": ("a = Tanh (g)\n active = Mul (a, u)", "experts-activation"),
    "mish": ("p = Softplus (g)\n t = Tanh (p)\n m = Mul (g, t)\n active = Mul (m, u)", "experts-activation"),
    "gelu with another slope": (
        """d = Mul (g, half)
        e = Erf (d)
        e1 = Add (e, one_float)
        m = Mul (g, e1)
        a = Mul (m, half)
        active = Mul (a, u)""",
        "experts-activation",
    ),
    "another power": ("r = Relu (g)\n a = Pow (r, three_float)\n active = Mul (a, u)", "experts-activation"),
    "scaled": ("s = Sigmoid (g)\n b = Mul (s, g)\n a = Mul (b, two_float)\n active = Mul (a, u)", "experts-activation"),
    "gate alone limited": (
        "l = Clip (g, , limit)\n s = Sigmoid (l)\n a = Mul (s, l)\n active = Mul (a, u)",
        "experts-activation",
    ),
    "other limits": (
        """l = Clip (g, , other_limit)
        v = Clip (u, low, limit)
        s = Sigmoid (l)
        a = Mul (s, l)
        active = Mul (a, v)""",
        "experts-activation",
    ),
    "sigmoid of both": (
        "s = Sigmoid (g)\n t = Sigmoid (u)\n a = Mul (s, t)\n active = Mul (a, u)",
        "experts-activation",
    ),
}


@pytest.mark.parametrize("case", STAYING)
def test_refused(case: str) -> None:
    text, reason = STAYING[case]
    assert_stays(experts(f"{HALVES['concat']}\n{text}"), reason, "")


def test_halves_of_two_layouts() -> None:
    text = f"""g = Slice (made1, start, middle, minus1)
        u = Slice (made1, odd, end, minus1, two_int)
        {ACTIVATIONS["silu"][0]}
        active = Mul (a, u)"""
    assert_stays(experts(text), "experts-form", "are not the two halves of the same rows")


def test_one_half_twice() -> None:
    text = f"""{HALVES["slices"]}
        same = Slice (made1, start, middle, minus1, odd)
        {ACTIVATIONS["silu"][0]}
        active = Mul (a, same)"""
    assert_stays(experts(text), "experts-form", "are not the two halves of the same rows")


def test_halves_of_a_view() -> None:
    """Of (R, I, 2) a split over the last axis takes the even and the odd elements."""
    text = f"""pairs = Reshape (made1, pair_shape)
        g0, u0 = Split <axis = -1, num_outputs = 2> (pairs)
        g = Squeeze (g0, minus1)
        u = Squeeze (u0, minus1)
        {ACTIVATIONS["silu"][0]}
        active = Mul (u, a)"""
    pairs = Experts(activation=f"\n{text}", constants={"pair_shape": np.array([-1, INNER, 2], np.int64)})
    assert_fuses(pairs, {"activation": "silu", "gate_layout": "interleaved"})


@pytest.mark.parametrize("halves", ["concat", "slices", "interleaved"])
def test_value_before_gate(halves: str) -> None:
    """The rows of the weights, and of the biases, are written in the order that FusedExperts takes."""
    text = f"{HALVES[halves]}\n s = Sigmoid (u)\n a = Mul (s, u)\n active = Mul (a, g)"
    assert_fuses(experts(text), {"activation": "silu", "gate_layout": "concat"})


def test_a_rounding_in_between_stays() -> None:
    """A float32 layer whose rows go through half precision is another one."""
    rounded = FC1.replace("made1 =", "exact1 =") + "\n low1 = Cast <to = 10> (exact1)\n made1 = Cast <to = 1> (low1)"
    text = f"{HALVES['concat']}\n s = Sigmoid (g)\n a = Mul (s, g)\n active = Mul (a, u)"
    assert_stays(experts(text, fc1=rounded), "experts-form", "is no product with the chosen experts' weights")
