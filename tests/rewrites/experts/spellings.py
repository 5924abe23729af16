"""Experts written in every form with every spelling of their parts: generated, to see that all of them are read.

x (T, H) -> router -> experts -> [scale] -> [residual] -> y (T, H)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from tests.rewrites.blocks import DTYPES, EXPERTS, HIDDEN, block
from tests.rewrites.experts.experts_models import INNER, ROUTER, K
from tests.rewrites.experts.forms import FORMS
from tests.rewrites.experts.texts import GROUPED_CONSTANTS, SCATTER

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
