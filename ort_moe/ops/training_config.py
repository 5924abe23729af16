"""The attributes of the training ops as checked values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ort_moe.ops import AUX_LOSS, ROUTER_PROBS, ROUTER_SCORES, AttributeValue, Op
from ort_moe.ops.router_config import RouterConfig
from ort_moe.ops.training_rows import MAX_EXPERTS


def router_probs_config(given: Mapping[str, AttributeValue]) -> RouterConfig:
    """Reads the attributes of a RouterProbs; those not given are neutral.

    Raises:
        ValueError: An attribute is unknown, missing, of another kind or not among its choices.
    """
    values = {"mixer_threshold": 0.0, "weights_from": "scores"} | ROUTER_PROBS.read(given)
    return RouterConfig(**values)  # type: ignore[arg-type]  # the row is made from FusedRouter's


def check_router_probs(config: RouterConfig, experts: int | None, has_selection_bias: bool) -> None:
    """Checks the attributes of a RouterProbs against each other and against the number of experts (None: not known).

    Raises:
        ValueError: They do not go together; one sentence names the attribute, what was expected and what came.
    """
    config.check(experts, has_selection_bias, ROUTER_PROBS.name)
    _check_experts(ROUTER_PROBS, "logits", experts)


@dataclass(frozen=True)
class RouterScoresConfig:
    """The attributes of a RouterScores under their names in the op table; floats are rounded to float32.

    The C++ kernels take the same (custom_ops/kernels/training/router_scores.h).
    """

    k: int
    score: str
    normalize: bool
    normalize_eps: float
    softcap: float

    @classmethod
    def from_attributes(cls, given: Mapping[str, AttributeValue]) -> RouterScoresConfig:
        """Reads a node's attributes; those not given are neutral.

        Raises:
            ValueError: An attribute is unknown, missing, of another kind or not among its choices.
        """
        return cls(**ROUTER_SCORES.read(given))  # type: ignore[arg-type]  # table and fields agree: test_training_config.py

    def check(self, experts: int | None) -> None:
        """Checks the attributes by themselves and against the number of experts (None: not known).

        Raises:
            ValueError: One is not what the op takes.
        """
        _check_k(ROUTER_SCORES, self.k, experts)
        if not (self.softcap >= 0.0 and math.isfinite(self.softcap)):
            raise _refusal(ROUTER_SCORES, "softcap", "finite and at least 0", self.softcap)
        _check_experts(ROUTER_SCORES, "logits", experts)


@dataclass(frozen=True)
class AuxLossConfig:
    """The attributes of an AuxLoss under their names in the op table; floats are rounded to float32.

    The C++ kernels take the same (custom_ops/kernels/training/aux_loss.h).
    """

    k: int
    coeff: float
    total_tokens: int

    @classmethod
    def from_attributes(cls, given: Mapping[str, AttributeValue]) -> AuxLossConfig:
        """Reads a node's attributes; those not given are neutral.

        Raises:
            ValueError: An attribute is unknown, missing, of another kind or not among its choices.
        """
        return cls(**AUX_LOSS.read(given))  # type: ignore[arg-type]  # table and fields agree: test_training_config.py

    def check(self, experts: int | None) -> None:
        """Checks the attributes by themselves and against the number of experts (None: not known).

        Raises:
            ValueError: One is not what the op takes.
        """
        _check_k(AUX_LOSS, self.k, experts)
        if not math.isfinite(self.coeff):
            raise _refusal(AUX_LOSS, "coeff", "finite", self.coeff)
        if self.total_tokens < 0:
            raise _refusal(AUX_LOSS, "total_tokens", "at least 0", self.total_tokens)
        _check_experts(AUX_LOSS, "probs", experts)


def _check_k(op: Op, k: int, experts: int | None) -> None:
    if k < 1:
        raise _refusal(op, "k", "at least 1", k)
    if experts is not None and k > experts:
        raise _refusal(op, "k", f"at most the number of experts, {experts}", k)


def _check_experts(op: Op, name: str, experts: int | None) -> None:
    if experts is not None and experts > MAX_EXPERTS:
        raise ValueError(f"{op.name}: input '{name}' must have at most {MAX_EXPERTS} experts, but has {experts}")


def _refusal(op: Op, attribute: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{op.name}: attribute '{attribute}' must be {expected}, but is {value}")
