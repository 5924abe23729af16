"""Small models whose experts run one by one: all of them, or those that an export's example input chose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from tests.rewrites.blocks import EXPERTS, HIDDEN, block

ROUTER = """
    scores = Softmax <axis = -1> (logits)
    raw, ids = TopK (scores, k)
    total = ReduceSum <keepdims = 1> (raw, minus1)
    weights = Div (raw, total)"""

CONSTANTS = {
    "zero": np.array([0]),
    "zeros": np.zeros((1, HIDDEN), np.float32),
    "off_on": np.array([0, 1]),
    "steps": np.ones(3, np.int64),
    "by_step": np.array([0, 1]),
    **{f"number_{expert}": np.array(expert) for expert in range(EXPERTS + 2)},
    **{f"expert_{expert}": np.eye(HIDDEN, dtype=np.float32) * expert for expert in range(EXPERTS)},
}

HITS = f"""
    table = OneHot <axis = -1> (ids, number_{EXPERTS}, off_on)
    by_expert = Transpose <perm = [2, 1, 0]> (table)
    counts = ReduceSum <keepdims = 0> (by_expert, axes)
    hit = Greater (counts, number_0)
    places = NonZero (hit)
    list = Transpose <perm = [1, 0]> (places)"""


def loop_over_hits(steps: str) -> ir.Model:
    """The experts that were hit, in a number of steps."""
    text = f"""{HITS}
        {steps}
        one_expert = Squeeze (step_1, zero)
        rows = Gather (by_expert, one_expert)
        matrix = Gather (experts, one_expert)
        flat = Squeeze (matrix, zero)
        y = MatMul (x, flat)"""
    return block(ROUTER, {**CONSTANTS, "axes": np.array([-1, -2])}, experts_text=text)


def compared(experts: Sequence[int]) -> ir.Model:
    """Every expert runs on all tokens, and its result is weighed by what the comparison leaves of the weights."""
    lines, total = [], "zeros"
    for expert in experts:
        lines.append(weighed(expert, total))
        total = f"sum_{expert}"
    return block(ROUTER, CONSTANTS, experts_text="".join(lines) + f"\n y = Identity ({total})")


def weighed(expert: int, total: str) -> str:
    """One expert on all tokens, weighed by what the comparison leaves of the weights; `sum_E` is the total with it."""
    return f"""
        is_{expert} = Equal (ids, number_{expert})
        mask_{expert} = Cast <to = 1> (is_{expert})
        masked_{expert} = Mul (weights, mask_{expert})
        weight_{expert} = ReduceSum <keepdims = 1> (masked_{expert}, minus1)
        made_{expert} = MatMul (x, expert_{expert})
        weighed_{expert} = Mul (made_{expert}, weight_{expert})
        sum_{expert} = Add ({total}, weighed_{expert})"""


def dispatched(experts: Sequence[int]) -> ir.Model:
    """Each expert runs on the tokens that chose it."""
    lines = [
        f"""
        table = OneHot <axis = -1> (ids, number_{EXPERTS + 1}, off_on)
        by_expert = Transpose <perm = [2, 1, 0]> (table)"""
    ]
    total = "zeros"
    for expert in experts:
        lines.append(
            f"""
            rows_{expert} = Gather <axis = 0> (by_expert, number_{expert})
            chosen_{expert} = Cast <to = 9> (rows_{expert})
            places_{expert} = NonZero (chosen_{expert})
            column_{expert} = Gather <axis = 0> (places_{expert}, number_1)
            tokens_{expert} = Gather <axis = 0> (x, column_{expert})
            made_{expert} = MatMul (tokens_{expert}, expert_{expert})
            some_{expert} = ReduceSum <keepdims = 1> (made_{expert}, zero)
            sum_{expert} = Add ({total}, some_{expert})"""
        )
        total = f"sum_{expert}"
    return block(ROUTER, CONSTANTS, experts_text="".join(lines) + f"\n y = Add (x, {total})")
