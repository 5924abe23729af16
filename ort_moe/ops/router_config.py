"""The attributes of a FusedRouter as one checked value, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ort_moe.ops import FUSED_ROUTER, AttributeValue


@dataclass(frozen=True)
class RouterConfig:
    """The attributes of a FusedRouter under their names in the op table; floats are rounded to float32.

    The C++ kernels take the same (custom_ops/kernels/router/fused_router.h).
    """

    k: int
    score: str
    mixer_threshold: float
    score_after_topk: bool
    bias_on: str
    num_groups: int
    topk_groups: int
    group_score_top: int
    group_fill: float
    weights_from: str
    normalize: bool
    normalize_eps: float
    normalize_min: float
    scale: float
    softcap: float

    @classmethod
    def from_attributes(cls, given: Mapping[str, AttributeValue]) -> RouterConfig:
        """Reads a node's attributes; those not given are neutral.

        Raises:
            ValueError: An attribute is unknown, missing, of another kind or not among its choices.
        """
        values = {"mixer_threshold": 0.0} | FUSED_ROUTER.read(given)
        return cls(**values)  # type: ignore[arg-type]  # the table and the fields agree: test_router_config.py

    def attributes(self) -> dict[str, AttributeValue]:
        """The complete attribute set of a node, in sorted order."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.score != "sparse_mixer":
            del values["mixer_threshold"]
        return FUSED_ROUTER.complete({n: int(v) if isinstance(v, bool) else v for n, v in values.items()})

    @property
    def has_groups(self) -> bool:
        """Whether a group mask takes part in the choice."""
        return self.topk_groups < self.num_groups

    @property
    def chosen_softmax(self) -> bool:
        """Whether normalised softmax weights are computed as the softmax over the chosen alone."""
        return (
            self.score == "softmax"
            and not self.score_after_topk
            and self.weights_from == "scores"
            and self.normalize
            and self.normalize_eps == 0.0
            and self.normalize_min == 0.0
        )

    def ranks_logits(self, has_selection_bias: bool) -> bool:
        """Whether the key that ranks an expert starts from its logit rather than its score."""
        return (
            self.score_after_topk
            or self.score in ("none", "sparse_mixer")
            or (self.score == "softmax" and not has_selection_bias and not self.has_groups)
        )

    def check(self, experts: int | None, has_selection_bias: bool, op_name: str = FUSED_ROUTER.name) -> None:
        """Checks the attributes against each other and against the number of experts.

        Args:
            experts: E, or None where it is not known yet.
            has_selection_bias: Whether the node has a selection_bias.
            op_name: The operator that the sentence names.

        Raises:
            ValueError: They do not go together; one sentence names the attribute, what was expected and what came.
        """
        try:
            self._check(experts, has_selection_bias)
        except ValueError as error:
            raise ValueError(f"{op_name}: {error}") from None

    def _check(self, experts: int | None, has_selection_bias: bool) -> None:
        self._check_numbers()
        self._check_groups()
        if self.score == "sparse_mixer":
            self._check_sparse_mixer(has_selection_bias)
        if self.bias_on == "logits" and not self.score_after_topk:
            raise _refusal("bias_on", "'score' unless score_after_topk = 1", "'logits'")
        if self.weights_from == "selection" and has_selection_bias:
            raise _refusal("weights_from", "'scores' with a selection_bias", "'selection'")
        if experts is not None:
            self._check_experts(experts)

    def _check_numbers(self) -> None:
        if self.k < 1:
            raise _refusal("k", "at least 1", self.k)
        if not (self.softcap >= 0.0 and math.isfinite(self.softcap)):
            raise _refusal("softcap", "finite and at least 0", self.softcap)

    def _check_groups(self) -> None:
        if self.num_groups < 1:
            raise _refusal("num_groups", "at least 1", self.num_groups)
        if not 1 <= self.topk_groups <= self.num_groups:
            raise _refusal("topk_groups", f"between 1 and num_groups = {self.num_groups}", self.topk_groups)
        if self.group_score_top < 1:
            raise _refusal("group_score_top", "at least 1", self.group_score_top)

    def _check_sparse_mixer(self, has_selection_bias: bool) -> None:
        if self.k != 2:
            raise _refusal("k", "2 with score = sparse_mixer", self.k)
        if not (self.mixer_threshold >= 0.0 and math.isfinite(self.mixer_threshold)):
            raise _refusal("mixer_threshold", "finite and at least 0", self.mixer_threshold)
        if self.score_after_topk:
            raise _refusal("score_after_topk", "0 with score = sparse_mixer", 1)
        if self.has_groups:
            raise _refusal("topk_groups", "equal to num_groups with score = sparse_mixer", self.topk_groups)
        if self.weights_from == "selection":
            raise _refusal("weights_from", "'scores' with score = sparse_mixer", "'selection'")
        if has_selection_bias:
            raise ValueError("input 'selection_bias' must be absent with score = sparse_mixer, but is given")

    def _check_experts(self, experts: int) -> None:
        if self.k > experts:
            raise _refusal("k", f"at most the number of experts, {experts}", self.k)
        if experts % self.num_groups:
            raise _refusal("num_groups", f"a divisor of the number of experts, {experts}", self.num_groups)
        group_size = experts // self.num_groups
        if self.group_score_top > group_size:
            raise _refusal("group_score_top", f"at most the experts per group, {group_size}", self.group_score_top)
        if self.has_groups and self.topk_groups * group_size < self.k:
            raise _refusal("k", f"at most the experts of the kept groups, {self.topk_groups * group_size}", self.k)


def _refusal(attribute: str, expected: str, value: object) -> ValueError:
    return ValueError(f"attribute '{attribute}' must be {expected}, but is {value}")
