"""Calls of PermuteTokens: one source for the reference, CPU and CUDA tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ort_moe.ops import PERMUTE_TOKENS
from ort_moe.reference.permute_tokens import permute_tokens
from tests.finalize_cases import random_indices
from tests.op_models import Array, assert_same_bits
from tests.router_cases import DTYPES

CHOICES = ("random", "one_expert", "outside", "none")
"""Kinds of choices, as in `random_indices`."""

OUTPUTS = tuple(tensor.name for tensor in PERMUTE_TOKENS.outputs)


@dataclass(frozen=True)
class PermuteCase:
    """One call, named by what it is drawn from so that a failure prints short and can be repeated.

    Attributes:
        leading: The leading dimensions.
        k: K.
        hidden: H.
        experts: E.
        onnx_type: Type of the rows by its ONNX name.
        choices: One of CHOICES.
        seed: Seed of all random values.
    """

    leading: tuple[int, ...]
    k: int
    hidden: int
    experts: int
    onnx_type: str = "float"
    choices: str = "random"
    seed: int = 0

    @cached_property
    def feeds(self) -> dict[str, Array]:
        """The inputs by name; x of any bits, NaN among them."""
        rng = np.random.default_rng(self.seed)
        dtype = DTYPES[self.onnx_type]
        bits = rng.integers(0, 256, (*self.leading, self.hidden * dtype.itemsize), np.uint8)
        indices = random_indices(self.choices, self.leading, self.k, self.experts, rng)
        if self.choices == "outside" and indices.size:
            indices.flat[0], indices.flat[-1] = np.iinfo(np.int32).min, np.iinfo(np.int32).max
        return {"x": bits.view(dtype), "indices": indices}

    @property
    def attributes(self) -> dict[str, Any]:
        """The node's attributes."""
        return {"num_experts": self.experts}

    def check(self, got: dict[str, Array]) -> None:
        """Holds all outputs, by name, against the reference."""
        rows, maps = permute_tokens(**self.feeds, num_experts=self.experts)
        for name, expected in zip(OUTPUTS, (rows, *maps), strict=True):
            if name == "permuted_x":  # copies: NaNs too have the same bits
                unsigned = np.dtype(f"u{expected.dtype.itemsize}")
                assert got[name].dtype == expected.dtype
                got, expected = got | {name: got[name].view(unsigned)}, expected.view(unsigned)
            try:
                assert_same_bits(got[name], expected)
            except AssertionError as error:
                raise AssertionError(f"{self}: {name}: {error}") from None


@st.composite
def permute_cases(draw: st.DrawFn) -> PermuteCase:
    """Calls over the op's whole range."""
    experts = draw(st.sampled_from((1, 3, 8, 60, 512)))
    return PermuteCase(
        leading=draw(st.sampled_from(((), (0,), (3, 0), (1,), (2, 3))) | st.integers(1, 300).map(lambda t: (t,))),
        k=draw(st.sampled_from((1, 2, 6, 10, 22)) | st.just(min(experts, 60))),
        hidden=draw(st.sampled_from((1, 8, 63, 64, 66, 300)) | st.integers(1, 600)),
        experts=experts,
        onnx_type=draw(st.sampled_from(tuple(DTYPES))),
        choices=draw(st.sampled_from(CHOICES)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
