"""What a form of experts reads from a graph: everything that a FusedExperts needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.ops import AttributeValue
from ort_moe.rewrites.experts.layer import Layer


@dataclass(frozen=True)
class ExpertsBlock:
    """The experts of one layer of a model.

    Attributes:
        y: What they return, (T, H); its name stays.
        x: One row a token, (..., H).
        weights: What each chosen expert counts, (..., K), of any floating-point type.
        indices: The chosen experts, (..., K), integers.
        fc1: The first layer.
        fc2: The second layer.
        attributes: Of the FusedExperts.
        residual: What is added to what the experts return, shaped like it, or None.
    """

    y: ir.Value
    x: ir.Value
    weights: ir.Value
    indices: ir.Value
    fc1: Layer
    fc2: Layer
    attributes: Mapping[str, AttributeValue]
    residual: ir.Value | None = None
