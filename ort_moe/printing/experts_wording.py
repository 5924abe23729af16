"""What a FusedExperts computes, in words."""

from __future__ import annotations

from collections.abc import Mapping

from ort_moe.ops import AttributeValue


def phrase(attributes: Mapping[str, AttributeValue]) -> str:
    """The experts of a layer for a cell of a table, as in `gated silu, slope 1.702, limit 7, value + 1`.

    Args:
        attributes: Of the FusedExperts, all.
    """
    activation = "no activation" if attributes["activation"] == "identity" else str(attributes["activation"])
    steps = [f"gated {activation}" if attributes["gated"] else activation]
    steps += [f"slope {attributes['alpha']:g}"] if attributes["alpha"] != 1.0 else []
    steps += [f"limit {attributes['limit']:g}"] if attributes["limit"] else []
    steps += [f"value + {attributes['beta']:g}"] if attributes["beta"] else []
    steps += ["gate and value in turn"] if attributes["gated"] and attributes["gate_layout"] == "interleaved" else []
    steps += ["weighed before the first layer"] if attributes["weight_on"] == "input" else []
    steps += [] if attributes["weight_format"] == "dense" else [f"weights in {attributes['weight_format']}"]
    return ", ".join(steps)
