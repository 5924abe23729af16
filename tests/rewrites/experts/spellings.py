"""Experts written in every form with every spelling of their parts: generated, to see that all of them are read.

x (T, H) -> router -> experts -> [scale] -> [residual] -> y (T, H)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from tests.rewrites.blocks import DTYPES, EXPERTS, HIDDEN, block
from tests.rewrites.experts.experts_models import INNER, ROUTER, K, transposed

# Reads `logits`, `ids` and `weights` and writes `by_expert`, the weights of all experts.
SCATTER = """
    shape = Shape (logits)
    nothing = ConstantOfShape (shape)
    scattered = ScatterElements <axis = 1> (nothing, ids, weights)
    by_expert = Transpose <perm = [1, 0]> (scattered)"""

# Choices sorted by expert: reads `list` and writes `rows`, and `ends` of each expert's among them.
SORT = """
    places_shape = Shape (list)
    sorted, perm = TopK <largest = 0> (list, places_shape)
    is_below = Less (perm, zero)
    rest = Mod (perm, k)
    has_rest = Cast <to = 9> (rest)
    rounds = And (is_below, has_rest)
    correction = Cast <to = 7> (rounds)
    quotient = Div (perm, k)
    token = Sub (quotient, correction)
    rows = Gather (x, token)
    float_ids = Cast <to = 1> (sorted)
    scaled = Div (float_ids, bin_width)
    bins0 = Cast <to = 7> (scaled)
    bins = Clip (bins0, first, last)
    ones = Expand (one_float, places_shape)
    counts = ScatterElements <axis = 0, reduction = "add"> (no_counts, bins, ones)
    whole_counts = Cast <to = 7> (counts)
    ends = CumSum (whole_counts, first)"""

# Reads `made2` and writes `weighted`, still sorted.
WEIGH_SORTED = """
    flat_weights = Reshape (weights, minus1)
    sorted_weights = GatherElements <axis = 0> (flat_weights, perm)
    weight_column = Unsqueeze (sorted_weights, minus1)
    weighted = Mul (made2, weight_column)"""

# Reads `weighted` and writes `y`.
UNSORT = """
    perm_column = Unsqueeze (perm, minus1)
    count = Size (perm)
    numbers = Range (first, count, step)
    inverse = ScatterND (perm, perm_column, numbers)
    back = Gather (weighted, inverse)
    by_token = Reshape (back, by_token_shape)
    y = ReduceSum <keepdims = 0> (by_token, one)"""

GROUPED_CONSTANTS = {
    "fc1": transposed("fc1"),
    "fc2": transposed("fc2"),
    "zero": np.array([0], np.int64),
    "first": np.array(0, np.int64),
    "last": np.array(EXPERTS - 1, np.int64),
    "step": np.array(1, np.int64),
    "bin_width": np.array((EXPERTS - 1) / EXPERTS, np.float32),
    "one_float": np.array(1.0, np.float32),
    "no_counts": np.zeros(EXPERTS, np.float32),
}
"""What these texts read."""

# Each reads `g@` and writes `a@`; @ is the expert's number where each has its own.
ACTIVATIONS: Mapping[str, tuple[str, str]] = {
    "silu": ("s@ = Sigmoid (g@)\n a@ = Mul (s@, g@)", "silu"),
    "silu, by Exp": (
        "n@ = Neg (g@)\n e@ = Exp (n@)\n d@ = Add (one_float, e@)\n a@ = Div (g@, d@)",
        "silu",
    ),
    "silu, reciprocal": (
        "n@ = Neg (g@)\n e@ = Exp (n@)\n d@ = Add (e@, one_float)\n r@ = Reciprocal (d@)\n a@ = Mul (g@, r@)",
        "silu",
    ),
    "swish": ("t@ = Mul (g@, alpha)\n s@ = Sigmoid (t@)\n a@ = Mul (g@, s@)", "silu"),
    "gelu": (
        "d@ = Div (g@, root_2)\n e@ = Erf (d@)\n p@ = Add (e@, one_float)\n m@ = Mul (g@, p@)\n a@ = Mul (m@, half)",
        "gelu",
    ),
    "gelu, half inside": (
        "d@ = Mul (g@, inverse_root_2)\n e@ = Erf (d@)\n h@ = Mul (e@, half)\n p@ = Add (h@, half)\n a@ = Mul (p@, g@)",
        "gelu",
    ),
    "gelu_tanh": (
        """q@ = Pow (g@, three_float)
        c@ = Mul (q@, cubic)
        i@ = Add (g@, c@)
        t@ = Mul (i@, root_2_pi)
        h@ = Tanh (t@)
        p@ = Add (h@, one_float)
        m@ = Mul (g@, half)
        a@ = Mul (m@, p@)""",
        "gelu_tanh",
    ),
    "gelu_tanh, by sigmoid": (
        """q@ = Mul (g@, g@)
        w@ = Mul (q@, g@)
        c@ = Mul (w@, cubic)
        i@ = Add (g@, c@)
        t@ = Mul (i@, twice_root_2_pi)
        h@ = Sigmoid (t@)
        a@ = Mul (g@, h@)""",
        "gelu_tanh",
    ),
    "relu": ("a@ = Relu (g@)", "relu"),
    "relu2": ("r@ = Relu (g@)\n a@ = Mul (r@, r@)", "relu2"),
    "relu2, Pow": ("r@ = Relu (g@)\n a@ = Pow (r@, two_float)", "relu2"),
    "relu2, times itself": ("r@ = Relu (g@)\n a@ = Mul (r@, g@)", "relu2"),
    "Gelu": ("a@ = Gelu (g@)", "gelu"),
    "identity": ("a@ = Identity (g@)", "identity"),
}

# Each reads `made1@` and writes `g0@` and `u0@`.
HALVES: Mapping[str, str] = {
    "concat": "g0@, u0@ = Split <axis = -1, num_outputs = 2> (made1@)",
    "concat, value first": "u0@, g0@ = Split <axis = -1, num_outputs = 2> (made1@)",
    "slices": "g0@ = Slice (made1@, start, middle, minus1)\n u0@ = Slice (made1@, middle, end, minus1)",
    "slices, value first": "u0@ = Slice (made1@, start, middle, minus1)\n g0@ = Slice (made1@, middle, end, minus1)",
    "interleaved": "g0@ = Slice (made1@, start, end, minus1, two)\n u0@ = Slice (made1@, odd, end, minus1, two)",
    "interleaved, value first": "u0@ = Slice (made1@, start, end, minus1, two)\n"
    " g0@ = Slice (made1@, odd, end, minus1, two)",
    "pairs": "pairs@ = Reshape (made1@, pairs_shape)\n gp@ = Gather <axis = -1> (pairs@, at_0)\n"
    " up@ = Gather <axis = -1> (pairs@, at_1)\n g0@ = Identity (gp@)\n u0@ = Identity (up@)",
}

# Each reads `g0@` and `u0@` and writes `g@` and `u@`.
LIMITS: Mapping[str, str] = {
    "none": "g@ = Identity (g0@)\n u@ = Identity (u0@)",
    "Clip": "g@ = Clip (g0@, , limit)\n u@ = Clip (u0@, low, limit)",
    "Min and Max": "g@ = Min (g0@, limit)\n u1@ = Max (low, u0@)\n u@ = Min (limit, u1@)",
}

# Each reads `a@` and `u@` and writes `active@`.
ORDERS: Mapping[str, str] = {
    "activation first": "active@ = Mul (a@, u@)",
    "value first": "active@ = Mul (u@, a@)",
    "value plus one": "v@ = Add (u@, one_float)\n active@ = Mul (v@, a@)",
    "value plus one, from the left": "v@ = Add (one_float, u@)\n active@ = Mul (a@, v@)",
}

SHARED = """
    in_shared = MatMul (x, shared1)
    on_shared = Relu (in_shared)
    shared = MatMul (on_shared, shared2)"""
GATED_SHARED = (
    SHARED.replace(" shared =", " bare_shared =")
    + """
    shared_logit = MatMul (x, shared_gate)
    shared_share = Sigmoid (shared_logit)
    shared = Mul (shared_share, bare_shared)"""
)

# Each reads `routed` and writes `y`; with the number of nodes that are left behind the experts.
RESIDUALS: Mapping[str, str] = {
    "none": "y = Identity (routed)",
    "right": SHARED + "\n y = Add (routed, shared)",
    "left": SHARED + "\n y = Add (shared, routed)",
    "gated": GATED_SHARED + "\n y = Add (routed, shared)",
    "x": "y = Add (x, routed)",
    "behind a view": """
        x3 = Unsqueeze (x, one)
        x3_shape = Shape (x3)
        routed3 = Reshape (routed, x3_shape)
        shared3 = Sin (x3)
        sum3 = Add (shared3, routed3)
        y = Squeeze (sum3, one)""",
    "behind a scale": SHARED + "\n enlarged = Mul (routed, factor)\n y = Add (enlarged, shared)",
    "scale alone": "y = Mul (factor, routed)",
}


def ranges() -> str:
    """Reads `ends` and writes `range0`, `range1` ...: the places of each expert's rows."""
    ends = ", ".join(f"end_{e}" for e in range(EXPERTS))
    lines = [f"{ends} = Split <axis = 0, num_outputs = {EXPERTS}> (ends)"]
    for e in range(EXPERTS):
        lines.append(f"end{e} = Squeeze (end_{e}, zero)")
        lines.append(f"range{e} = Range ({f'end{e - 1}' if e else 'first'}, end{e}, step)")
    return "".join(f"\n    {line}" for line in lines)


@dataclass(frozen=True)
class Spelling:
    """How a block is written: each a key of the table of its name."""

    form: str = "batched"
    activation: str = "silu"
    gated: bool = True
    halves: str = "concat"
    limits: str = "none"
    order: str = "activation first"
    bias: bool = False
    residual: str = "none"
    dtype: str = "float"
    transposed: bool = False

    def model(self) -> ir.Model:
        """The block, with random weights."""
        scatter = SCATTER.replace("ConstantOfShape (", "Expand (none_chosen, ")
        return block(
            ROUTER + (scatter if "dense" in self.form or "table" in self.form else ""),
            self.constants(),
            dtype=self.dtype,
            experts_text=FORMS[self.form](self) + "\n" + RESIDUALS[self.residual],
        )

    @property
    def width(self) -> int:
        return 2 * INNER if self.gated else INNER

    @property
    def is_fusable(self) -> bool:
        """Whether FusedExperts has such experts: those that are not chosen must add nothing."""
        return not (self.bias and self.form == "dense, weights on the input")

    @property
    def runs(self) -> bool:
        """Whether ONNX Runtime's CPU runs it: its ScatterND adds no half precision."""
        return not (self.dtype == "float16" and self.form in ("dispatched", "dispatched by comparison"))

    def between(self, suffix: str = "") -> str:
        """What stands between the layers: reads `made1`, writes `active`."""
        activation = ACTIVATIONS[self.activation][0]
        if self.gated:
            parts = [HALVES[self.halves], LIMITS[self.limits], activation, ORDERS[self.order]]
        else:
            parts = ["g@ = Identity (made1@)", activation, "active@ = Identity (a@)"]
        return "\n".join(("", *parts)).replace("@", suffix)

    def constants(self) -> dict[str, Any]:
        rng = np.random.default_rng(17)
        dtype = DTYPES[self.dtype]
        fc1 = rng.standard_normal((EXPERTS, self.width, HIDDEN)).astype(dtype)
        fc2 = rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(dtype)
        bias1 = rng.standard_normal((EXPERTS, self.width)).astype(dtype)
        bias2 = rng.standard_normal((EXPERTS, HIDDEN)).astype(dtype)
        lies = (lambda w: w.swapaxes(-1, -2)) if self.transposed else (lambda w: w)
        views = {"dense": [EXPERTS, -1, INNER, 2], "batched by": [-1, K, INNER, 2]}
        pairs = next((shape for form, shape in views.items() if self.form.startswith(form)), [-1, INNER, 2])
        numbers = {
            "half": 0.5, "one_float": 1.0, "two_float": 2.0, "three_float": 3.0, "zero_float": 0.0,
            "root_2": math.sqrt(2.0), "inverse_root_2": math.sqrt(0.5), "root_2_pi": math.sqrt(2.0 / math.pi),
            "twice_root_2_pi": 2.0 * math.sqrt(2.0 / math.pi), "cubic": 0.044715, "alpha": 1.702, "limit": 0.5,
            "low": -0.5, "factor": 2.5,
        }  # fmt: skip
        return {
            **GROUPED_CONSTANTS,
            "one_choice": GROUPED_CONSTANTS["one_float"],
            **numbers,
            "start": np.array([0]), "odd": np.array([1]), "middle": np.array([INNER]), "end": np.array([2**62]),
            "at_0": np.array(0), "at_1": np.array(1), "pairs_shape": np.array(pairs),
            "tile_k": np.array([1, K, 1]), "rows_of_x": np.array([-1, HIDDEN]),
            "by_token_shape": np.array([-1, K, HIDDEN]),
            "fc1": lies(fc1), "fc2": lies(fc2), "bias1": bias1, "bias2": bias2,
            "none_chosen": np.array(0, dtype), "zeros": np.zeros((1, HIDDEN), dtype),
            "tile_experts": np.array([EXPERTS, 1]), "column_shape": np.array([-1, 1]),
            "by_expert_shape": np.array([EXPERTS, -1, HIDDEN]),
            "shared1": rng.standard_normal((HIDDEN, 5)).astype(dtype),
            "shared2": rng.standard_normal((5, HIDDEN)).astype(dtype),
            "shared_gate": rng.standard_normal((HIDDEN, 1)).astype(dtype),
            "all_experts": np.array(EXPERTS), "off_on": np.array([0, 1]), "each_expert": np.arange(EXPERTS),
            "corner": np.array([0, 0]), "first_end": np.array([1, 2**62]), "both": np.array([0, 1]),
            **{f"number{e}": np.array(e) for e in range(EXPERTS)},
            **{f"place{e}": np.array([e]) for e in range(EXPERTS + 1)},
            **{f"fc1_{e}": lies(fc1[e]) for e in range(EXPERTS)},
            **{f"fc2_{e}": lies(fc2[e]) for e in range(EXPERTS)},
            **{f"bias1_{e}": bias1[e] for e in range(EXPERTS)},
            **{f"bias2_{e}": bias2[e] for e in range(EXPERTS)},
        }  # fmt: skip


def _batched(spelling: Spelling) -> str:
    def layer(number: int, rows: str) -> str:
        axis = "one" if spelling.transposed else "minus1"
        operands = f"column{number}, matrices{number}" if spelling.transposed else f"matrices{number}, column{number}"
        text = f"""
            matrices{number} = Gather <axis = 0> (fc{number}, list)
            column{number} = Unsqueeze ({rows}, {axis})
            product{number} = MatMul ({operands})
            bare{number} = Squeeze (product{number}, {axis})"""
        return text + (
            f"\n row{number} = Gather (bias{number}, list)\n made{number} = Add (bare{number}, row{number})"
            if spelling.bias
            else f"\n made{number} = Identity (bare{number})"
        )

    return f"""
        xk = Unsqueeze (x, one)
        copies = Tile (xk, tile_k)
        rows = Reshape (copies, rows_of_x)
        list = Reshape (ids, minus1)
        {layer(1, "rows")}
        {spelling.between()}
        {layer(2, "active")}
        flat_weights = Reshape (weights, minus1)
        weight_column = Unsqueeze (flat_weights, minus1)
        weighted = Mul (made2, weight_column)
        by_token = Reshape (weighted, by_token_shape)
        routed = ReduceSum <keepdims = 0> (by_token, one)"""


def _grouped(spelling: Spelling) -> str:
    def layer(number: int, rows: str) -> str:
        lines = []
        pieces = ", ".join(f"m{number}_{e}" for e in range(EXPERTS))
        lines.append(f"{pieces} = Split <axis = 0, num_outputs = {EXPERTS}> (stack{number})")
        for e in range(EXPERTS):
            lines.append(f"r{number}_{e} = Gather ({rows}, range{e})")
            lines.append(f"w{number}_{e} = Squeeze (m{number}_{e}, start)")
            lines.append(f"p{number}_{e} = MatMul (r{number}_{e}, w{number}_{e})")
        parts = ", ".join(f"p{number}_{e}" for e in range(EXPERTS))
        lines.append(f"bare{number} = Concat <axis = 0> ({parts})")
        if spelling.bias:
            lines += [f"row{number} = Gather (bias{number}, sorted)", f"made{number} = Add (bare{number}, row{number})"]
        else:
            lines.append(f"made{number} = Identity (bare{number})")
        return "\n".join(lines)

    turn = "Identity" if spelling.transposed else "Transpose <perm = [0, 2, 1]>"
    return f"""
        stack1 = {turn} (fc1)
        stack2 = {turn} (fc2)
        list = Reshape (ids, minus1)
        {SORT.replace("one_float", "one_choice")}
        {ranges()}
        {layer(1, "rows")}
        {spelling.between()}
        {layer(2, "active")}
        {WEIGH_SORTED}
        {UNSORT.replace("y =", "routed =")}"""


def _dense(spelling: Spelling, *, on_input: bool) -> str:
    turn = "Identity" if spelling.transposed else "Transpose <perm = [0, 2, 1]>"
    text = f"\n stack1 = {turn} (fc1)\n stack2 = {turn} (fc2)"
    if spelling.bias:
        text += "\n row1 = Unsqueeze (bias1, one)\n row2 = Unsqueeze (bias2, one)"
    rows = "x"
    if on_input:
        text += """
            copies = Tile (x, tile_experts)
            column = Reshape (by_expert, column_shape)
            weighed = Mul (copies, column)
            rows = Reshape (weighed, by_expert_shape)"""
        rows = "rows"

    def layer(number: int, rows: str) -> str:
        bias = f"Add (bare{number}, row{number})" if spelling.bias else f"Identity (bare{number})"
        return f"\n bare{number} = MatMul ({rows}, stack{number})\n made{number} = {bias}"

    text += layer(1, rows) + spelling.between() + layer(2, "active")
    if on_input:
        return text + "\n routed = ReduceSum <keepdims = 0> (made2, start)"
    return (
        text
        + """
        column = Unsqueeze (by_expert, minus1)
        weighted = Mul (made2, column)
        routed = ReduceSum <keepdims = 0> (weighted, start)"""
    )


def _single(spelling: Spelling, term: Callable[[int, str, str], str], start: str = "", total: str = "zeros") -> str:
    """The experts one by one; `term` weighs what one returns, and adds it to the total."""
    text = start

    def layer(number: int, rows: str, e: int) -> str:
        if spelling.bias:
            if spelling.transposed:
                return f"\n made{number}{e} = Gemm ({rows}, fc{number}_{e}, bias{number}_{e})"
            return (
                f"\n t{number}{e} = Transpose <perm = [1, 0]> (fc{number}_{e})"
                f"\n bare{number}{e} = MatMul ({rows}, t{number}{e})"
                f"\n made{number}{e} = Add (bias{number}_{e}, bare{number}{e})"
            )
        if spelling.transposed:
            return f"\n made{number}{e} = MatMul ({rows}, fc{number}_{e})"
        return f"\n made{number}{e} = Gemm <transB = 1> ({rows}, fc{number}_{e})"

    for e in range(EXPERTS):
        after = "routed" if e == EXPERTS - 1 else f"total{e}"
        before, behind = term(e, total, after).split("EXPERT\n")
        rows = f"rows{e}" if f"rows{e} =" in before else "x"
        text += before + layer(1, rows, e) + spelling.between(str(e)) + layer(2, f"active{e}", e) + "\n" + behind
        total = after
    return text


def _compared(e: int, total: str, after: str) -> str:
    return f"""EXPERT
        is{e} = Equal (ids, number{e})
        masked{e} = Where (is{e}, weights, none_chosen)
        share{e} = ReduceSum <keepdims = 1> (masked{e}, minus1)
        term{e} = Mul (made2{e}, share{e})
        {after} = Add ({total}, term{e})"""


def _by_table(e: int, total: str, after: str) -> str:
    return f"""EXPERT
        share{e} = Slice (scattered, place{e}, place{e + 1}, minus1)
        term{e} = Mul (share{e}, made2{e})
        {after} = Add ({total}, term{e})"""


def _by_row_of_table(e: int, total: str, after: str) -> str:
    return f"""EXPERT
        row{e} = Gather (by_expert, number{e})
        share{e} = Unsqueeze (row{e}, minus1)
        term{e} = Mul (made2{e}, share{e})
        {after} = Add (term{e}, {total})"""


ONE_HOT = """
    table = OneHot <axis = -1> (ids, all_experts, off_on)
    turned = Transpose <perm = [2, 1, 0]> (table)
    x_shape = Shape (x)
    zero_rows = Expand (none_chosen, x_shape)"""
EQUALS = """
    apart_ids = Unsqueeze (ids, minus1)
    equal = Equal (apart_ids, each_expert)
    table = Cast <to = 7> (equal)
    turned = Transpose <perm = [2, 1, 0]> (table)
    x_shape = Shape (x)
    zero_rows = Expand (none_chosen, x_shape)"""


def _dispatched(e: int, total: str, after: str) -> str:
    """As torch's exporter writes index_add."""
    return f"""
        mask{e} = Gather (turned, number{e})
        found{e} = NonZero (mask{e})
        pairs_of{e} = Transpose <perm = [1, 0]> (found{e})
        slot{e} = Slice (pairs_of{e}, place0, place1, one)
        token{e} = Slice (pairs_of{e}, place1, place2, one)
        flat_token{e} = Squeeze (token{e}, one)
        rows{e} = Gather (x, flat_token{e})
        EXPERT
        at{e} = Concat <axis = -1> (token{e}, slot{e})
        apart_weights{e} = Unsqueeze (weights, two)
        share{e} = GatherND (apart_weights{e}, at{e})
        term{e} = Mul (made2{e}, share{e})
        {after} = ScatterND <reduction = "add"> ({total}, token{e}, term{e})"""


def _dispatched_apart(e: int, total: str, after: str) -> str:
    """As its older exporter, which traces, does."""
    return f"""
        row_mask{e} = Gather (turned, number{e})
        mask{e} = Cast <to = 9> (row_mask{e})
        found{e} = NonZero (mask{e})
        pairs_of{e} = Transpose <perm = [1, 0]> (found{e})
        slot_column{e}, token_column{e} = Split <axis = 1, num_outputs = 2> (pairs_of{e})
        slot{e} = Squeeze (slot_column{e}, one)
        token{e} = Squeeze (token_column{e}, one)
        x1{e} = Unsqueeze (x, place0)
        rows1{e} = Gather <axis = 1> (x1{e}, token{e})
        rows{e} = Reshape (rows1{e}, rows_of_x)
        EXPERT
        list_of_weights{e} = Reshape (weights, column_shape)
        base{e} = Mul (token{e}, two)
        at{e} = Add (slot{e}, base{e})
        share{e} = Gather (list_of_weights{e}, at{e})
        term{e} = Mul (made2{e}, share{e})
        first_row{e} = Slice ({total}, corner, first_end, both)
        first_shape{e} = Shape (first_row{e})
        spread{e} = Expand (term{e}, first_shape{e})
        token_again{e} = Unsqueeze (token{e}, minus1)
        spread_shape{e} = Shape (spread{e})
        spread_token{e} = Expand (token_again{e}, spread_shape{e})
        total_shape{e} = Shape ({total})
        empty{e} = Expand (none_chosen, total_shape{e})
        put{e} = ScatterElements <axis = 0> (empty{e}, spread_token{e}, spread{e})
        {after} = Add ({total}, put{e})"""


def _batched_einsum(spelling: Spelling) -> str:
    """Choices are an axis of their own."""

    def layer(number: int, rows: str, letters: str) -> str:
        matrices = "tkdn" if spelling.transposed else "tknd"
        text = f"""
            matrices{number} = Gather <axis = 0> (fc{number}, ids)
            bare{number} = Einsum <equation = "{letters},{matrices}->tkn"> ({rows}, matrices{number})"""
        if not spelling.bias:
            return text + f"\n made{number} = Identity (bare{number})"
        return text + f"\n row{number} = Gather (bias{number}, ids)\n made{number} = Add (row{number}, bare{number})"

    between = spelling.between()
    return f"""
        {layer(1, "x", "td")}
        {between}
        {layer(2, "active", "tkd")}
        routed = Einsum <equation = "tk,tkn->tn"> (weights, made2)"""


def _dense_einsum(spelling: Spelling) -> str:
    def layer(number: int, rows: str, letters: str) -> str:
        matrices = "edn" if spelling.transposed else "end"
        text = f"""
            bare{number} = Einsum <equation = "{matrices}, {letters} -> etn"> (fc{number}, {rows})"""
        if not spelling.bias:
            return text + f"\n made{number} = Identity (bare{number})"
        text += f"\n row{number} = Unsqueeze (bias{number}, one)"
        return text + f"\n made{number} = Add (bare{number}, row{number})"

    return f"""
        {layer(1, "x", "td")}
        {spelling.between()}
        {layer(2, "active", "etd")}
        routed = Einsum <equation = "eth,te->th"> (made2, scattered)"""


FORMS: Mapping[str, Callable[[Spelling], str]] = {
    "batched": _batched,
    "grouped": _grouped,
    "batched by Einsum": _batched_einsum,
    "dense by Einsum": _dense_einsum,
    "dense": lambda spelling: _dense(spelling, on_input=False),
    "dense, weights on the input": lambda spelling: _dense(spelling, on_input=True),
    "unrolled": lambda spelling: _single(spelling, _compared),
    "unrolled, by columns of a table": lambda spelling: _single(spelling, _by_table),
    "unrolled, by rows of a table": lambda spelling: _single(spelling, _by_row_of_table),
    "dispatched": lambda spelling: _single(spelling, _dispatched, ONE_HOT, "zero_rows"),
    "dispatched by comparison": lambda spelling: _single(spelling, _dispatched, EQUALS, "zero_rows"),
    "dispatched, put among zeros": lambda spelling: _single(spelling, _dispatched_apart, ONE_HOT, "zero_rows"),
}
