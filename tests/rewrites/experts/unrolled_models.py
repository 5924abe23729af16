"""Experts written out one after the other on all tokens, as several tests read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.rewrites.blocks import EXPERTS, HIDDEN
from tests.rewrites.experts.experts_models import INNER, Experts

RNG = np.random.default_rng(3)
WEIGHTS: dict[str, Any] = {
    **{f"gate{e}": RNG.standard_normal((HIDDEN, INNER)).astype(np.float32) for e in range(EXPERTS)},
    **{f"up{e}": RNG.standard_normal((HIDDEN, INNER)).astype(np.float32) for e in range(EXPERTS)},
    **{f"down{e}": RNG.standard_normal((INNER, HIDDEN)).astype(np.float32) for e in range(EXPERTS)},
    **{f"turned{e}": RNG.standard_normal((HIDDEN, INNER)).astype(np.float32) for e in range(EXPERTS)},
    **{f"bias_gate{e}": RNG.standard_normal(INNER).astype(np.float32) for e in range(EXPERTS)},
    **{f"bias_up{e}": RNG.standard_normal(INNER).astype(np.float32) for e in range(EXPERTS)},
    **{f"bias_down{e}": RNG.standard_normal(HIDDEN).astype(np.float32) for e in range(EXPERTS)},
    **{f"number{e}": np.array(e) for e in range(EXPERTS)},
    "zeros": np.zeros((1, HIDDEN), np.float32),
    "nothing": np.array(0, np.float32),
}


def gated(e: int) -> str:
    return f"""
        g{e} = MatMul (x, gate{e})
        u{e} = MatMul (x, up{e})
        s{e} = Sigmoid (g{e})
        o{e} = Mul (g{e}, s{e})
        a{e} = Mul (o{e}, u{e})
        made{e} = MatMul (a{e}, down{e})"""


def with_biases(e: int) -> str:
    return f"""
        g{e} = Gemm (x, gate{e}, bias_gate{e})
        u0{e} = MatMul (x, up{e})
        u{e} = Add (u0{e}, bias_up{e})
        s{e} = Sigmoid (g{e})
        o{e} = Mul (g{e}, s{e})
        a{e} = Mul (o{e}, u{e})
        m{e} = Gemm <transB = 1> (a{e}, turned{e})
        made{e} = Add (bias_down{e}, m{e})"""


def plain(e: int) -> str:
    return f"""
        g{e} = MatMul (x, gate{e})
        a{e} = Relu (g{e})
        made{e} = MatMul (a{e}, down{e})"""


def by_product(e: int) -> str:
    return f"""
        is{e} = Equal (ids, number{e})
        mask{e} = Cast <to = 1> (is{e})
        masked{e} = Mul (weights, mask{e})
        share{e} = ReduceSum <keepdims = 1> (masked{e}, minus1)"""


def by_choice(e: int) -> str:
    return f"""
        is{e} = Equal (number{e}, ids)
        masked{e} = Where (is{e}, weights, nothing)
        sum{e} = ReduceSum <keepdims = 0> (masked{e}, minus1)
        share{e} = Unsqueeze (sum{e}, minus1)"""


def unrolled(
    expert: Callable[[int], str] = gated,
    share: Callable[[int], str] = by_product,
    order: Sequence[int] = range(EXPERTS),
    **changes: Any,
) -> Experts:
    lines, total = [], "zeros"
    for e in order:
        after = "y" if e == order[-1] else f"total{e}"
        lines += [expert(e), share(e), f"\n term{e} = Mul (made{e}, share{e})\n {after} = Add ({total}, term{e})"]
        total = after
    text = "".join(lines)
    empty = dict.fromkeys(("repeat", "list", "fc1", "activation", "fc2", "weigh"), "")
    return Experts(**{**empty, "sum": text, "constants": WEIGHTS, **changes})
