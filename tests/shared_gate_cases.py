"""Calls of SharedGateRouter: one source for the reference, CPU and CUDA tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ort_moe.ops import AttributeValue
from ort_moe.reference.shared_gate_router import shared_gate_router
from tests.router_cases import DTYPES, TEXTURES, RouterCase, random_logits, router_cases

HIDDEN_TEXTURES = ("normal", "wide", "zeros", "infinities", "nan")
"""Kinds of hidden rows, as those of logits."""


@dataclass(frozen=True)
class SharedGateCase:
    """One call, named by what it is drawn from so that a failure prints short and can be repeated.

    Attributes:
        router: The router's part, with the leading dimensions, the type and the seed.
        hidden_size: H.
        shared: S.
        scale: shared_scale.
        base: shared_base; None: E.
        texture: The kind of hidden rows, one of HIDDEN_TEXTURES.
    """

    router: RouterCase
    hidden_size: int
    shared: int = 1
    scale: float = 1.0
    base: int | None = None
    texture: str = "normal"

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        """The node's complete attributes."""
        base = self.router.experts if self.base is None else self.base
        return self.router.attributes | {"shared_scale": self.scale, "shared_base": base}

    @property
    def columns(self) -> int:
        """K + S."""
        return self.router.k + self.shared

    @cached_property
    def hidden(self) -> npt.NDArray[Any]:
        """(..., H); sums of products stay near 1."""
        rng = np.random.default_rng(self.router.seed + 3)
        dtype = DTYPES[self.router.onnx_type]
        return random_logits(self.texture, (*self.router.shape[:-1], self.hidden_size), dtype, rng)

    @cached_property
    def gate_weight(self) -> npt.NDArray[Any]:
        """(S, H)."""
        rng = np.random.default_rng(self.router.seed + 4)
        values = rng.normal(0.0, self.hidden_size**-0.5, (self.shared, self.hidden_size))
        return values.astype(DTYPES[self.router.onnx_type])

    @property
    def feeds(self) -> dict[str, Any]:
        """The inputs by name."""
        feeds = {"logits": self.router.logits, "hidden": self.hidden, "gate_weight": self.gate_weight}
        vectors = {"selection_bias": self.router.selection_bias, "expert_scale": self.router.expert_scale}
        return feeds | {name: vector for name, vector in vectors.items() if vector is not None}

    def emulate(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Weights and indices of the float32 emulation."""
        return shared_gate_router(**self.feeds, **self.attributes)


@st.composite
def shared_gate_cases(
    draw: st.DrawFn,
    *,
    max_experts: int = 1100,
    textures: tuple[str, ...] = TEXTURES,
    hidden_textures: tuple[str, ...] = HIDDEN_TEXTURES,
) -> SharedGateCase:
    """Calls over the op's whole range."""
    router = draw(router_cases(max_experts=max_experts, textures=textures))
    return SharedGateCase(
        router,
        hidden_size=draw(st.sampled_from((1, 7, 8, 64, 1000, 1024, 1032, 2049)) | st.integers(1, 3000)),
        shared=draw(st.sampled_from((1, 2, 3, 4, 5, 8))),
        scale=draw(st.sampled_from((1.0, 0.5, -2.0))),
        base=draw(st.sampled_from((None, None, 0, 7))),
        texture=draw(st.sampled_from(hidden_textures)),
    )
