"""The names among which arguments of the API and options of the command choose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

Target = Literal["cuda", "cpu", "contrib"]
"""Where a model shall run; `contrib`: in ONNX Runtime's own nodes in place of ours."""
TARGETS: tuple[Target, ...] = get_args(Target)
USUAL_TARGET: Target = "cuda"
"""Where none is named."""

Precision = Literal["fp32", "fp16", "bf16"]
"""What an export makes of weights."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Packed = Literal["nvfp4", "mxfp4", "int4", "int8", "fp8"]
"""What experts' weights can be packed to."""
PACKED: tuple[Packed, ...] = get_args(Packed)

BLOCK_SIZES = (16, 32, 64, 128)
"""Weights that may share a scale in int4 and int8, and in fp8 rows too."""

Weights = Literal["keep", Packed]
"""What becomes of experts' weights."""
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


def check_choice(what: str, given: str, choices: Collection[str]) -> None:
    """Looks whether a name is among those that there are.

    Raises:
        ValueError: It is not; the message lists them.
    """
    if given not in choices:
        raise ValueError(f"{what} '{given}' is unknown; there are {', '.join(choices)}")
