"""Calls of FinalizeRouting: one source for the reference, CPU and CUDA tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ort_moe.reference.routing_maps import routing_maps
from tests.router_cases import DTYPES

CHOICES = (
    "random",  # also repeated in a row
    "one_expert",
    "outside",  # some name no expert
    "none",  # all name no expert
    "any_map",  # a map that no router would make
)
"""Kinds of choices."""


def random_indices(
    choices: str, leading: tuple[int, ...], k: int, experts: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """Choices of one kind, (..., K)."""
    low, high = {"outside": (-2, experts + 2), "none": (experts, experts + 3)}.get(choices, (0, experts))
    if choices == "one_expert":
        low, high = experts - 1, experts
    return rng.integers(low, high, (*leading, k), np.int32)


@dataclass(frozen=True)
class FinalizeCase:
    """One call, named by what it is drawn from so that a failure prints short and can be repeated.

    Attributes:
        leading: The leading dimensions.
        k: K.
        hidden: H.
        experts: E.
        onnx_type: Type of the rows by its ONNX name.
        choices: One of CHOICES.
        special: Sprinkle infinities, NaN, zeros of both signs and subnormals.
        has_bias: Whether there is a bias.
        has_residual: Whether there is a residual.
        seed: Seed of all random values.
    """

    leading: tuple[int, ...]
    k: int
    hidden: int
    experts: int
    onnx_type: str = "float"
    choices: str = "random"
    special: bool = False
    has_bias: bool = False
    has_residual: bool = False
    seed: int = 0

    @cached_property
    def feeds(self) -> dict[str, Any]:
        """The inputs by name."""
        rng = np.random.default_rng(self.seed)
        rows = int(np.prod(self.leading, dtype=np.int64)) * self.k
        indices = random_indices(self.choices, self.leading, self.k, self.experts, rng)
        permuted = routing_maps(indices, self.experts).unpermuted_to_permuted
        if self.choices == "any_map":
            permuted = rng.integers(-2, rows + 2, rows, np.int32)
        feeds = {
            "expert_output": self._values(rng, (rows, self.hidden)),
            "weights": rng.normal(0.0, 1.0, (*self.leading, self.k)).astype(np.float32),
            "indices": indices,
            "unpermuted_to_permuted": permuted,
        }
        if self.has_bias:
            feeds["bias"] = self._values(rng, (self.experts, self.hidden))
        if self.has_residual:
            feeds["residual"] = self._values(rng, (*self.leading, self.hidden))
        return feeds

    def _values(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        values = rng.normal(0.0, 2.0, shape)
        if self.special:
            few = rng.random(shape)
            values = np.select(
                [few < 0.1, few < 0.15, few < 0.2, few < 0.3, few < 0.4],
                [np.copysign(0.0, values), np.copysign(np.inf, values), np.nan, values * 2.0**-130, values * 6e4],
                values,
            )
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[self.onnx_type])


@st.composite
def finalize_cases(draw: st.DrawFn, onnx_types: tuple[str, ...] = tuple(DTYPES)) -> FinalizeCase:
    """Calls over the op's whole range."""
    return FinalizeCase(
        leading=draw(st.sampled_from(((), (0,), (3, 0), (1,), (2, 3))) | st.integers(1, 9).map(lambda t: (t,))),
        k=draw(st.sampled_from((1, 2, 6, 8, 10, 22))),
        hidden=draw(st.sampled_from((1, 8, 63, 64, 65, 300, 1024)) | st.integers(1, 600)),
        experts=draw(st.sampled_from((1, 3, 8, 60))),
        onnx_type=draw(st.sampled_from(onnx_types)),
        choices=draw(st.sampled_from(CHOICES)),
        special=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
