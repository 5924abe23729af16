"""The attributes of a FusedExperts as one checked value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ort_moe.ops import FUSED_EXPERTS, AttributeValue

_BLOCK_SIZED = ("int4", "int8", "fp8")


@dataclass(frozen=True)
class ExpertsConfig:
    """The attributes of a FusedExperts under their names in the op table; floats are rounded to float32.

    The C++ kernels take the same (custom_ops/kernels/experts/fused_experts.h).
    """

    weight_format: str
    block_size: int
    activation: str
    gated: bool
    gate_layout: str
    alpha: float
    beta: float
    limit: float
    weight_on: str

    @classmethod
    def from_attributes(cls, given: Mapping[str, AttributeValue]) -> ExpertsConfig:
        """Reads a node's attributes; those not given are neutral.

        Raises:
            ValueError: An attribute is unknown, missing, of another kind, not among its choices, or does not go with
                the others.
        """
        config = cls(**FUSED_EXPERTS.read(given))  # type: ignore[arg-type]  # table and fields agree: test_experts_config.py
        config._check()
        return config

    def fc1_rows(self, inner: int) -> int:
        """N of fc1 for I inner elements."""
        return 2 * inner if self.gated else inner

    @property
    def scale_block(self) -> int:
        """Weights along D that share a scale; 1 where there are no scales."""
        return {"dense": 1, "nvfp4": 16, "mxfp4": 32}.get(self.weight_format, self.block_size)

    @property
    def depth_multiple(self) -> int:
        """What D is a multiple of."""
        return 1 if self.weight_format == "fp8" else self.scale_block

    @property
    def nibbles(self) -> bool:
        """Whether a byte holds two weights."""
        return self.weight_format in ("nvfp4", "mxfp4", "int4")

    @property
    def with_format(self) -> str:
        """The format, for the end of a sentence."""
        block = f" and block_size = {self.block_size}" if self.block_size else ""
        return f"with weight_format = {self.weight_format}{block}"

    def _check(self) -> None:
        of_format = f"with weight_format = {self.weight_format}"
        if self.weight_format in _BLOCK_SIZED:
            if self.block_size == 0:
                raise _refusal("block_size", f"16, 32, 64 or 128 {of_format}", 0)
        elif self.block_size != 0:
            raise _refusal("block_size", f"0 {of_format}", self.block_size)
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not math.isfinite(value):
                raise _refusal(name, "finite", value)
        if not (self.limit >= 0.0 and math.isfinite(self.limit)):
            raise _refusal("limit", "finite and at least 0", self.limit)
        if self.activation != "silu" and self.alpha != 1.0:
            raise _refusal("alpha", "1 unless activation = silu", self.alpha)
        for name, value in (("beta", self.beta), ("limit", self.limit)):
            if not self.gated and value != 0.0:
                raise _refusal(name, "0 with gated = 0", value)


def _refusal(attribute: str, expected: str, value: float) -> ValueError:
    return ValueError(f"FusedExperts: attribute '{attribute}' must be {expected}, but is {value:g}")
