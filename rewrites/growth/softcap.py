"""FusedRouter(c * Tanh(x / c)) -> FusedRouter(x, softcap = c)."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.rule import Refusal, RouterRule, require, require_logits, router
from ort_moe.rewrites.values import producer, scalar_beside


class Softcap(RouterRule):
    """FusedRouter(Mul(Tanh(Div(x, c)), c)) -> FusedRouter(x, softcap = c).

    For one positive constant c; the division may be a product with 1 / c. The cap acts on the logits, so it is absorbed
    behind any score.
    """

    title = "softcap"
    root = "FusedRouter"
    commutes = True

    def pattern(self, op: Any, inner: Any, cap: Any) -> Any:
        return router(op, op.Mul(op.Tanh(inner), cap))

    def read(self, weights: ir.Value, inner: ir.Value, cap: ir.Value, **_: Any) -> tuple[ir.Value, float]:
        require(Router.producing(weights).attributes["softcap"] == 0.0, "the FusedRouter already has a soft cap")
        limit = scalar_beside(cap, inner)
        if limit is None or not 0.0 < limit < np.inf:
            raise Refusal(f"the soft cap '{cap.name}' is not one positive constant")
        division = producer(inner, "Div", "Mul")
        for position in (0, 1) if division is not None and division.op_type == "Mul" else (0,):
            x, factor = (None, None) if division is None else (division.inputs[position], division.inputs[1 - position])
            number = scalar_beside(factor, x)
            if x is None or number is None or division is None:
                continue
            expected = limit if division.op_type == "Div" else 1.0 / limit
            require(
                np.float32(number) == np.float32(expected), f"the tanh's input is scaled by {number}, not by the cap"
            )
            require_logits(x)
            return x, limit
        raise Refusal("the tanh's input is not divided by a constant")

    def rewrite(self, op: Any, weights: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        x, limit = self.read(weights=weights, **matched)
        return Router.producing(weights).grow(op, self.title, logits=x, softcap=limit)


SOFTCAP_RULES = (Softcap(),)
