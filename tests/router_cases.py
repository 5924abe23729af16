"""Hypothesis strategies for router configurations: one source for the CPU, CUDA, reference and rewrite tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ort_moe.ops import FUSED_ROUTER, AttributeValue
from ort_moe.reference.fused_router import fused_router

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Logit types by their ONNX names."""

TEXTURES = (
    "normal",  # what a trained router gives
    "wide",  # scores saturate and underflow
    "close",  # neighbouring values of the format
    "ties",  # few distinct values
    "constant",
    "zeros",  # of both signs
    "infinities",
    "nan",
    "few_finite",  # fewer finite logits than are chosen
    "saturated",  # sigmoids at 1 up to rounding
    "bits",  # any bit pattern
)
"""Kinds of logits."""

EXPERTS = (1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 60, 64, 72, 128, 160, 256, 257, 384, 512, 1000, 1024, 1032, 2304, 4096)
"""Expert counts on and beside sizes that kernels treat apart: 8 to a load, 32 to a warp, 1024 to a round of sums."""


@dataclass(frozen=True)
class RouterCase:
    """One call of a FusedRouter, named by what it is drawn from so that a failure prints short and can be repeated.

    Attributes:
        attributes: The complete attribute set.
        shape: Shape of the logits, (..., E).
        onnx_type: Type of the logits by its ONNX name.
        texture: The kind of logits, one of TEXTURES.
        seed: Seed of all random values.
        has_selection_bias: Whether there is a selection_bias.
        has_expert_scale: Whether there is an expert_scale.
    """

    attributes: dict[str, AttributeValue]
    shape: tuple[int, ...]
    onnx_type: str = "float"
    texture: str = "normal"
    seed: int = 0
    has_selection_bias: bool = False
    has_expert_scale: bool = False

    @property
    def experts(self) -> int:
        return self.shape[-1]

    @property
    def k(self) -> int:
        return int(self.attributes["k"])

    @cached_property
    def logits(self) -> npt.NDArray[Any]:
        """(..., E) float32, float16 or bfloat16."""
        return random_logits(self.texture, self.shape, DTYPES[self.onnx_type], np.random.default_rng(self.seed))

    @cached_property
    def selection_bias(self) -> npt.NDArray[np.float32] | None:
        """(E) float32, or None."""
        if not self.has_selection_bias:
            return None
        spread = 10.0 if self.texture == "saturated" else 0.5
        return np.random.default_rng(self.seed + 1).normal(0.0, spread, self.experts).astype(np.float32)

    @cached_property
    def expert_scale(self) -> npt.NDArray[np.float32] | None:
        """(E) float32, or None."""
        if not self.has_expert_scale:
            return None
        return np.random.default_rng(self.seed + 2).uniform(0.5, 2.0, self.experts).astype(np.float32)

    def emulate(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Weights and indices of the float32 emulation."""
        return fused_router(self.logits, self.selection_bias, self.expert_scale, **self.attributes)


def random_logits(
    texture: str, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator
) -> npt.NDArray[Any]:
    """Logits of one kind of TEXTURES."""
    x = rng.normal(0.0, 2.0, shape)
    match texture:
        case "wide":
            x *= 60.0
        case "close":
            x = rng.integers(-4, 5, shape) * 2.0**-22 + 1.0
        case "ties":
            x = rng.integers(-2, 3, shape).astype(np.float64)
        case "constant":
            x = np.full(shape, rng.normal())
        case "zeros":
            x = np.copysign(0.0, x)
        case "infinities":
            x = np.where(rng.random(shape) < 0.2, np.copysign(np.inf, x), x)
        case "nan":
            x = np.where(rng.random(shape) < 0.2, np.nan, x)
        case "few_finite":
            x = np.where(rng.random(shape) < 2.0 / shape[-1], x, -np.inf)
        case "saturated":
            x = 30.0 + np.abs(x) * 10.0
        case "bits":
            unsigned = np.uint32 if dtype.itemsize == 4 else np.uint16
            return rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(dtype)
    return x.astype(dtype)


@st.composite
def router_attributes(
    draw: st.DrawFn, experts: int, *, has_selection_bias: bool = False, scores: tuple[str, ...] | None = None
) -> dict[str, AttributeValue]:
    """Complete, valid attribute sets for this many experts.

    Args:
        experts: E.
        has_selection_bias: Whether the node has a selection_bias.
        scores: Choose among these scores; None: all that go with the other arguments.
    """
    if scores is None:
        scores = ("softmax", "sigmoid", "sqrtsoftplus", "none")
        if experts >= 2 and not has_selection_bias:
            scores += ("sparse_mixer",)
    score = draw(st.sampled_from(scores))
    given: dict[str, AttributeValue] = {
        "score": score,
        "normalize": draw(st.integers(0, 1)),
        "normalize_eps": draw(st.sampled_from((0.0, 1e-20, 1e-6))),
        "normalize_min": draw(st.sampled_from((0.0, 1e-12, -math.inf))),
        "scale": draw(st.sampled_from((1.0, 2.5, 0.5, -1.0))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 5.0, 30.0))),
    }
    if score == "sparse_mixer":
        given |= {"k": 2, "mixer_threshold": draw(st.sampled_from((0.0, 0.02, 0.5, 10.0)))}
        return FUSED_ROUTER.complete(given)

    given["score_after_topk"] = draw(st.integers(0, 1))
    if given["score_after_topk"]:
        given["bias_on"] = draw(st.sampled_from(("score", "logits")))
    if not has_selection_bias:
        given["weights_from"] = draw(st.sampled_from(("scores", "selection")))
    divisors = [n for n in range(1, min(experts, 64) + 1) if experts % n == 0]
    num_groups = draw(st.sampled_from(divisors)) if draw(st.booleans()) else 1
    size = experts // num_groups
    topk_groups = draw(st.integers(1, num_groups))
    eligible = topk_groups * size
    all_of_them = eligible <= 128 and draw(st.integers(0, 7)) == 0
    given |= {
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "group_score_top": draw(st.integers(1, min(size, 4))),
        "group_fill": draw(st.sampled_from((-math.inf, 0.0))),
        "k": eligible if all_of_them else draw(st.integers(1, min(eligible, 64))),
    }
    return FUSED_ROUTER.complete(given)


@st.composite
def router_cases(
    draw: st.DrawFn,
    *,
    max_experts: int = 4096,
    max_tokens: int = 8,
    textures: tuple[str, ...] = TEXTURES,
    onnx_types: tuple[str, ...] = tuple(DTYPES),
    scores: tuple[str, ...] | None = None,
) -> RouterCase:
    """Calls of a FusedRouter over its whole range: leading dims of rank 0 to 3, no tokens, every kind of logits."""
    experts = draw(st.sampled_from([e for e in EXPERTS if e <= max_experts]) | st.integers(1, max_experts))
    has_bias = (scores is None or "sparse_mixer" not in scores) and draw(st.booleans())
    attributes = draw(router_attributes(experts, has_selection_bias=has_bias, scores=scores))
    leading = draw(
        st.sampled_from(((), (0,), (1,), (3, 0), (2, 1), (1, 2, 2)))
        | st.integers(1, max_tokens).map(lambda tokens: (tokens,))
    )
    return RouterCase(
        attributes=attributes,
        shape=(*leading, experts),
        onnx_type=draw(st.sampled_from(onnx_types)),
        texture=draw(st.sampled_from(textures)),
        seed=draw(st.integers(0, 2**32 - 1)),
        has_selection_bias=has_bias,
        has_expert_scale=draw(st.booleans()),
    )
