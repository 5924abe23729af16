"""Calls of RouterProbs, RouterScores and AuxLoss, forward and backward: chosen by pairs, for tests of any device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.kernels import training
from ort_moe.ops import ROUTER_PROBS, ROUTER_SCORES, AttributeValue
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig, router_probs_config
from ort_moe.reference.aux_loss import aux_loss, aux_loss_grad
from ort_moe.reference.router_probs import bitmap, router_probs, router_probs_grad
from ort_moe.reference.router_scores import router_scores, router_scores_grad
from tests import device_arrays, host_arrays
from tests.pairwise import pairwise
from tests.router_cases import DTYPES, random_logits

Array = npt.NDArray[Any]

EXPERTS = (8, 60, 64, 128, 192, 256, 384, 512, 896, 1024, 2304, 4096)
CHOSEN = (1, 2, 4, 8, 10, 16, 22, 32, 36, 64)
TOKENS = (1, 7, 33, 65)
TEXTURES = ("normal", "ties", "wide", "constant", "infinities", "nan", "few_finite")

SCORINGS: dict[str, dict[str, AttributeValue]] = {
    "softmax before": {"score": "softmax"},
    "softmax after": {"score": "softmax", "normalize": 1},
    "softmax after, by name": {"score": "softmax", "score_after_topk": 1},
    "softmax before, divided": {"score": "softmax", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5},
    "softmax after, divided": {"score": "softmax", "score_after_topk": 1, "normalize": 1, "normalize_eps": 0.25},
    "sigmoid": {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5},
    "sigmoid, not divided": {"score": "sigmoid", "scale": 0.5},
    "sigmoid, floored": {"score": "sigmoid", "normalize": 1, "normalize_min": 3.0},
    "sigmoid after": {"score": "sigmoid", "score_after_topk": 1, "bias_on": "logits"},
    "sqrtsoftplus": {"score": "sqrtsoftplus", "normalize": 1, "normalize_eps": 1e-20},
    "sqrtsoftplus, not divided": {"score": "sqrtsoftplus", "softcap": 30.0},
    "none": {"score": "none", "normalize": 1, "normalize_min": -math.inf, "softcap": 5.0},
}
"""Each way to the weights, and to their gradients."""

GROUPS: dict[str, dict[str, AttributeValue]] = {
    "none": {},
    "4, best 2": {"num_groups": 4, "topk_groups": 2, "group_score_top": 2},
    "2, best 1 by zero": {"num_groups": 2, "topk_groups": 1, "group_score_top": 1, "group_fill": 0.0},
}


@dataclass(frozen=True)
class Memory:
    """Where a call's arrays lie, and how a launcher is told.

    Attributes:
        put: Makes an array of values there.
        empty: Makes an output there that nobody has written yet.
        where: The launchers' keywords.
    """

    put: Callable[[Array], Any]
    empty: Callable[[tuple[int, ...], Any], Any]
    where: dict[str, Any] = field(default_factory=dict)


ON_HOST = Memory(host_arrays.HostArray, host_arrays.poisoned, {"cpu_threads": 1})
ON_DEVICE = Memory(device_arrays.DeviceArray, device_arrays.poisoned)


@dataclass(frozen=True)
class TrainingCase:
    """One call of RouterProbs or RouterScores and its gradient; also the probs of an AuxLoss.

    Attributes:
        attributes: The op's attributes.
        tokens: T.
        experts: E.
        onnx_type: Type of the logits by its ONNX name.
        texture: The kind of logits, as in tests/router_cases.py.
        map_format: `byte` or `bit`.
        has_bias: Whether there is a selection_bias.
        has_expert_scale: Whether there is an expert_scale.
        seed: Of all random values.
    """

    attributes: dict[str, AttributeValue]
    tokens: int
    experts: int
    onnx_type: str = "float"
    texture: str = "normal"
    map_format: str = "byte"
    has_bias: bool = False
    has_expert_scale: bool = False
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return (self.tokens, self.experts)

    @property
    def sizes(self) -> dict[str, Any]:
        """The launchers' keywords for the shape."""
        return {"rows": self.tokens, "experts": self.experts, "dtype": self.onnx_type}

    @cached_property
    def logits(self) -> Array:
        """(T, E) of the type."""
        return random_logits(self.texture, self.shape, DTYPES[self.onnx_type], np.random.default_rng(self.seed))

    @cached_property
    def grad(self) -> Array:
        """(T, E) of the type: the gradient that comes in."""
        return np.random.default_rng(self.seed + 1).normal(size=self.shape).astype(DTYPES[self.onnx_type])

    @cached_property
    def selection_bias(self) -> Array | None:
        """(E) float32, or None."""
        values = np.random.default_rng(self.seed + 2).normal(0.0, 0.5, self.experts).astype(np.float32)
        return values if self.has_bias else None

    @cached_property
    def expert_scale(self) -> Array | None:
        """(E) float32, or None."""
        values = np.random.default_rng(self.seed + 3).uniform(0.5, 2.0, self.experts).astype(np.float32)
        return values if self.has_expert_scale else None

    def in_format(self, routing_map: Array) -> Array:
        """A map as the launchers store it: uint8."""
        return bitmap(routing_map) if self.map_format == "bit" else routing_map.view(np.uint8)


def probs_cases() -> list[TrainingCase]:
    """Calls of RouterProbs in which every two values of different factors meet."""
    factors = {
        "scoring": list(SCORINGS),
        "bias": (False, True),
        "groups": list(GROUPS),
        "dtype": list(DTYPES),
        "k": CHOSEN,
        "experts": EXPERTS,
        "tokens": TOKENS,
        "texture": TEXTURES,
        "map": training.MAP_FORMATS,
        "expert_scale": (False, True),
    }
    cases = []
    for seed, case in enumerate(pairwise(factors)):
        groups = GROUPS[case["groups"]]
        eligible = case["experts"] // 2 if groups else case["experts"]
        attributes = {"k": min(case["k"], eligible), **SCORINGS[case["scoring"]], **groups}
        cases.append(
            TrainingCase(
                ROUTER_PROBS.complete(attributes),
                _tokens(case),
                case["experts"],
                case["dtype"],
                case["texture"],
                case["map"],
                case["bias"],
                case["expert_scale"],
                seed,
            )
        )
    return cases


def scores_cases() -> list[TrainingCase]:
    """Calls of RouterScores in which every two values of different factors meet."""
    factors = {
        "score": ROUTER_SCORES.attribute("score").choices,
        "normalize": (0, 1),
        "softcap": (0.0, 30.0),
        "dtype": list(DTYPES),
        "k": CHOSEN,
        "experts": EXPERTS,
        "tokens": TOKENS,
        "texture": TEXTURES,
        "map": training.MAP_FORMATS,
    }
    return [
        TrainingCase(
            {
                "k": min(case["k"], case["experts"]),
                "score": case["score"],
                "normalize": case["normalize"],
                "normalize_eps": 1e-20,
                "softcap": case["softcap"],
            },
            _tokens(case),
            case["experts"],
            case["dtype"],
            case["texture"],
            case["map"],
            seed=seed,
        )
        for seed, case in enumerate(pairwise(factors))
    ]


def _tokens(case: dict[str, Any]) -> int:
    """T, bounded so that the emulation takes milliseconds."""
    return min(int(case["tokens"]), max(1, 2**15 // int(case["experts"])))


def run_probs(case: TrainingCase, memory: Memory = ON_HOST) -> tuple[Array, Array, Array]:
    """Probs, map and indices of the launcher, the map as it is stored."""
    config = router_probs_config(case.attributes)
    probs, indices = memory.empty(case.shape, DTYPES[case.onnx_type]), memory.empty((case.tokens, config.k), np.int32)
    width = case.experts if case.map_format == "byte" else -(-case.experts // 8)
    routing_map = memory.empty((case.tokens, width), np.uint8)
    vectors = [None if v is None else memory.put(v) for v in (case.selection_bias, case.expert_scale)]
    logits = memory.put(case.logits)
    training.router_probs(
        config,
        **case.sizes,
        logits=logits.address,
        probs=probs.address,
        routing_map=routing_map.address,
        map_format=case.map_format,
        indices=indices.address,
        selection_bias=None if vectors[0] is None else vectors[0].address,
        expert_scale=None if vectors[1] is None else vectors[1].address,
        **memory.where,
    )
    return probs.read(), routing_map.read(), indices.read()


def expected_probs(case: TrainingCase) -> tuple[Array, Array, Array]:
    """What `run_probs` returns by the emulation."""
    probs, routing_map, indices = router_probs(case.logits, case.selection_bias, case.expert_scale, **case.attributes)
    return probs, case.in_format(routing_map), indices


def run_probs_grad(case: TrainingCase, routing_map: Array, memory: Memory = ON_HOST) -> Array:
    """The gradient of the logits by the launcher, for a bool map."""
    logits, grad = memory.put(case.logits), memory.put(case.grad)
    stored = memory.put(case.in_format(routing_map))
    scale = None if case.expert_scale is None else memory.put(case.expert_scale)
    grad_logits = memory.empty(case.shape, DTYPES[case.onnx_type])
    training.router_probs_grad(
        router_probs_config(case.attributes),
        **case.sizes,
        logits=logits.address,
        routing_map=stored.address,
        grad_probs=grad.address,
        grad_logits=grad_logits.address,
        map_format=case.map_format,
        expert_scale=None if scale is None else scale.address,
        **memory.where,
    )
    return np.asarray(grad_logits.read())


def expected_probs_grad(case: TrainingCase, routing_map: Array) -> Array:
    """What `run_probs_grad` returns by the emulation."""
    return router_probs_grad(case.logits, routing_map, case.grad, case.expert_scale, **case.attributes)


def run_scores(case: TrainingCase, memory: Memory = ON_HOST) -> tuple[Array, Array, Array]:
    """Scores, map as it is stored, and the gradient of the logits by the launchers."""
    config = RouterScoresConfig.from_attributes(case.attributes)
    dtype = DTYPES[case.onnx_type]
    logits, grad = memory.put(case.logits), memory.put(case.grad)
    scores, grad_logits = memory.empty(case.shape, dtype), memory.empty(case.shape, dtype)
    width = case.experts if case.map_format == "byte" else -(-case.experts // 8)
    routing_map = memory.empty((case.tokens, width), np.uint8)
    training.router_scores(
        config,
        **case.sizes,
        logits=logits.address,
        scores=scores.address,
        routing_map=routing_map.address,
        map_format=case.map_format,
        **memory.where,
    )
    training.router_scores_grad(
        config,
        **case.sizes,
        logits=logits.address,
        grad_scores=grad.address,
        grad_logits=grad_logits.address,
        **memory.where,
    )
    return scores.read(), routing_map.read(), grad_logits.read()


def expected_scores(case: TrainingCase) -> tuple[Array, Array, Array]:
    """What `run_scores` returns by the emulation."""
    scores, routing_map = router_scores(case.logits, **case.attributes)
    return scores, case.in_format(routing_map), router_scores_grad(case.logits, case.grad, **case.attributes)


@dataclass(frozen=True)
class AuxLossCase:
    """One call of AuxLoss and its gradient.

    Attributes:
        tokens: T.
        experts: E.
        onnx_type: Type of probs by its ONNX name.
        count_type: Type of the counts and of the total by its ONNX name.
        total: Of tokens: None: the rows; below 0: the attribute; else a number in memory.
        texture: The kind of probs, as in tests/router_cases.py.
    """

    tokens: int
    experts: int
    onnx_type: str = "float"
    count_type: str = "int64"
    total: int | None = None
    texture: str = "normal"

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        given = -self.total if self.total is not None and self.total < 0 else 0
        return {"k": min(4, self.experts), "coeff": 1e-2, "total_tokens": given}

    @cached_property
    def probs(self) -> Array:
        """(T, E) of the type."""
        rng = np.random.default_rng(self.tokens)
        return random_logits(self.texture, (self.tokens, self.experts), DTYPES[self.onnx_type], rng)

    @cached_property
    def counts(self) -> Array:
        """(E) of the count type."""
        values = np.random.default_rng(self.experts).integers(0, 1 + 8 * self.tokens, self.experts)
        return values.astype(np.float32 if self.count_type == "float" else self.count_type)

    @property
    def total_array(self) -> Array | None:
        """The total in memory, or None."""
        return None if self.total is None or self.total < 0 else np.array([self.total], self.counts.dtype)


GRAD_LOSS = np.float32(1.75)


def aux_loss_cases() -> list[AuxLossCase]:
    """Calls of AuxLoss in which every two values of different factors meet."""
    factors = {
        "tokens": (1, 7, 65, 511, 512, 513, 1100),
        "experts": (1, 7, *EXPERTS),
        "onnx_type": list(DTYPES),
        "count_type": training.COUNT_TYPES,
        "total": (None, 4096, -8192, 0),
        "texture": ("normal", "ties", "infinities", "nan"),
    }
    cases = [AuxLossCase(**case) for case in pairwise(factors)]
    return [case for case in cases if case.tokens * case.experts <= 2**20]


def run_aux_loss(case: AuxLossCase, memory: Memory = ON_HOST) -> tuple[Array, Array]:
    """The loss, (1), and the gradient of probs, by the launchers."""
    config = AuxLossConfig.from_attributes(case.attributes)
    probs, counts = memory.put(case.probs), memory.put(case.counts)
    total = None if case.total_array is None else memory.put(case.total_array)
    loss, grad_probs = memory.empty((1,), np.float32), memory.empty(case.probs.shape, case.probs.dtype)
    grad_loss = memory.put(np.array([GRAD_LOSS]))
    shared: dict[str, Any] = {
        "rows": case.tokens,
        "experts": case.experts,
        "dtype": case.onnx_type,
        "tokens_per_expert": counts.address,
        "count_type": case.count_type,
        "total": None if total is None else total.address,
        "total_type": case.count_type,
    }
    scratch = None
    if "cpu_threads" not in memory.where:
        sizes = {name: shared[name] for name in ("rows", "experts", "dtype")}
        scratch = memory.empty((max(1, training.aux_loss_scratch_bytes(**sizes)),), np.uint8)
    training.aux_loss(
        config,
        **shared,
        probs=probs.address,
        loss=loss.address,
        scratch=None if scratch is None else scratch.address,
        **memory.where,
    )
    training.aux_loss_grad(config, **shared, grad_loss=grad_loss.address, grad_probs=grad_probs.address, **memory.where)
    return loss.read(), grad_probs.read()


def expected_aux_loss(case: AuxLossCase) -> tuple[Array, Array]:
    """What `run_aux_loss` returns by the emulation."""
    loss = aux_loss(case.probs, case.counts, case.total_array, **case.attributes)
    grad = aux_loss_grad(
        case.probs.shape, case.probs.dtype, case.counts, GRAD_LOSS, case.total_array, **case.attributes
    )
    return np.array([loss]), grad
