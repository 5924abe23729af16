"""Calls of GatherFinalize: one source for the reference, CPU and CUDA tests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ort_moe.reference.routing_maps import routing_maps
from tests.finalize_cases import CHOICES, FinalizeCase, random_indices
from tests.router_cases import DTYPES


@dataclass(frozen=True)
class GatherFinalizeCase:
    """One call, named by what it is drawn from so that a failure prints short and can be repeated.

    Attributes:
        leading: The leading dimensions.
        k: K.
        hidden: H.
        padding: H_padded - H.
        experts: E.
        local: The first local expert, and how many there are; None: all.
        capacity: M; less than an expert's rows leaves some out.
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
    padding: int = 0
    local: tuple[int, int] | None = None
    capacity: int = 4
    onnx_type: str = "float"
    choices: str = "random"
    special: bool = False
    has_bias: bool = False
    has_residual: bool = False
    seed: int = 0

    @property
    def attributes(self) -> dict[str, int]:
        """The node's attributes."""
        begin, count = self.local or (0, self.experts)
        return {"hidden_size": self.hidden, "local_begin": begin, "local_count": count}

    @cached_property
    def feeds(self) -> dict[str, Any]:
        """The inputs by name. What no choice uses is NaN: rows beyond an expert's, and the padding."""
        rng = np.random.default_rng(self.seed)
        rows = int(np.prod(self.leading, dtype=np.int64)) * self.k
        indices = random_indices(self.choices, self.leading, self.k, self.experts, rng)
        maps = routing_maps(indices, self.experts)
        permuted, offset = maps.unpermuted_to_permuted, maps.expert_first_token_offset
        if self.choices == "any_map":
            permuted = rng.integers(-2, rows + 2, rows, np.int32)
            offset = rng.integers(-2, rows + 2, self.experts + 1, np.int64)
        begin, count = self.local or (0, self.experts)
        values = FinalizeCase(
            (1,), count * self.capacity, self.hidden, self.experts, self.onnx_type, special=self.special,
            has_bias=self.has_bias, seed=self.seed,
        ).feeds  # fmt: skip
        expert_output = np.full((count, self.capacity, self.hidden + self.padding), np.nan, DTYPES[self.onnx_type])
        expert_output[..., : self.hidden] = values["expert_output"].reshape(count, self.capacity, self.hidden)
        if self.choices != "any_map":
            for expert in range(count):
                used = offset[begin + expert + 1] - offset[begin + expert]
                expert_output[expert, used:] = np.nan
        feeds = {
            "expert_output": expert_output,
            "weights": rng.normal(0.0, 1.0, (*self.leading, self.k)).astype(np.float32),
            "indices": indices,
            "unpermuted_to_permuted": permuted,
            "expert_first_token_offset": offset,
        }
        if self.has_bias:
            feeds["bias"] = values["bias"]
        if self.has_residual:
            feeds["residual"] = rng.normal(0.0, 2.0, (*self.leading, self.hidden)).astype(DTYPES[self.onnx_type])
        return feeds

    @property
    def permuted(self) -> tuple[dict[str, Any], bool]:
        """FinalizeRouting's inputs for the same rows, gathered by the maps; and whether a capacity left none out."""
        feeds = {name: array for name, array in self.feeds.items() if name != "expert_first_token_offset"}
        offset = self.feeds["expert_first_token_offset"]
        begin, count = self.local or (0, self.experts)
        rows = np.zeros((self.feeds["unpermuted_to_permuted"].size, self.hidden), feeds["expert_output"].dtype)
        places = np.full(rows.shape[0], -1, np.int32)
        whole = True
        for expert in range(begin, begin + count):
            first, last = int(offset[expert]), int(offset[expert + 1])
            whole &= last - first <= self.capacity
            kept = min(last - first, self.capacity)
            rows[first : first + kept] = feeds["expert_output"][expert - begin, :kept, : self.hidden]
            here = (feeds["unpermuted_to_permuted"] >= first) & (feeds["unpermuted_to_permuted"] < first + kept)
            places[here] = feeds["unpermuted_to_permuted"][here]
        return feeds | {"expert_output": rows, "unpermuted_to_permuted": places}, whole


@st.composite
def gather_finalize_cases(draw: st.DrawFn, onnx_types: tuple[str, ...] = tuple(DTYPES)) -> GatherFinalizeCase:
    """Calls over the op's whole range."""
    experts = draw(st.sampled_from((1, 3, 8, 60)))
    begin = draw(st.integers(0, experts - 1))
    local = draw(st.none() | st.integers(1, experts - begin).map(lambda count: (begin, count)))
    return GatherFinalizeCase(
        leading=draw(st.sampled_from(((), (0,), (3, 0), (1,), (2, 3))) | st.integers(1, 9).map(lambda t: (t,))),
        k=draw(st.sampled_from((1, 2, 6, 8, 10, 22))),
        hidden=draw(st.sampled_from((1, 8, 63, 64, 65, 300, 1024)) | st.integers(1, 600)),
        padding=draw(st.sampled_from((0, 1, 8, 24))),
        experts=experts,
        local=local,
        capacity=draw(st.sampled_from((0, 1, 2, 9, 40))),
        onnx_type=draw(st.sampled_from(onnx_types)),
        choices=draw(st.sampled_from(CHOICES)),
        special=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        has_residual=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
