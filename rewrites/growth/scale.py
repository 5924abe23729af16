"""weights(FusedRouter(x)) * c -> FusedRouter(x, scale = c)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.rule import Refusal, RouterRule, require, require_only_consumers, router
from ort_moe.rewrites.values import scalar_beside

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""Normal numbers of float32: a product of factors outside loses what the factors, one after the other, keep."""


class Scale(RouterRule):
    """Mul(w, c) -> FusedRouter(scale * c).

    For a finite constant c and w the weights of a FusedRouter.
    """

    title = "scale"
    root = "Mul"
    commutes = True

    def pattern(self, op: Any, logits: Any, factor: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Mul(weights, factor, _outputs=["scaled"]), indices

    def read(self, weights: ir.Value, factor: ir.Value, scaled: ir.Value, **_: Any) -> float:
        return self._scale(weights, scaled, scalar_beside(factor, weights), f"'{factor.name}'")

    def rewrite(self, op: Any, weights: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        return Router.producing(weights).grow(op, self.title, scale=self.read(weights=weights, **matched))

    def _scale(self, weights: ir.Value, scaled: ir.Value, factor: float | None, name: str) -> float:
        found = Router.producing(weights)
        node = scaled.producer()
        assert node is not None
        if factor is None or not math.isfinite(factor):
            raise Refusal(f"the factor {name} is not one finite constant")
        require_only_consumers(weights, node)
        scale = float(found.attributes["scale"]) * factor
        require(
            scale == 0.0 or _SMALLEST <= abs(scale) <= _LARGEST,
            f"the scale would become {scale:.3g}, which float32 cannot hold",
        )
        return float(np.float32(scale))


class ScaleByQuotient(Scale):
    """Div(w, c) -> FusedRouter(scale / c).

    For a constant c other than 0.
    """

    root = "Div"
    commutes = False

    def pattern(self, op: Any, logits: Any, factor: Any) -> Any:
        weights, indices = router(op, logits)
        return op.Div(weights, factor, _outputs=["scaled"]), indices

    def read(self, weights: ir.Value, factor: ir.Value, scaled: ir.Value, **_: Any) -> float:
        divisor = scalar_beside(factor, weights)
        reciprocal = 1.0 / divisor if divisor else None
        return self._scale(weights, scaled, reciprocal, f"1 / '{factor.name}'")


SCALE_RULES = (Scale(), ScaleByQuotient())
