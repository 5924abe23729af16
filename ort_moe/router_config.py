"""The attributes of a FusedRouter as one checked value, and what follows from them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ort_moe.ops import FUSED_ROUTER, AttributeValue


@dataclass(frozen=True)
class RouterConfig:
    """The attributes of a FusedRouter under their names in the op table; floats are rounded to float32.

    The C++ kernels take the same (custom_ops/kernels/fused_router.h).
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
        values: dict[str, AttributeValue] = {"mixer_threshold": 0.0}
        names = [attribute.name for attribute in FUSED_ROUTER.attributes]
        for name in given:
            if name not in names:
                raise ValueError(f"FusedRouter: expected attributes among {', '.join(names)}, got '{name}'")
        values.update(FUSED_ROUTER.complete(given))
        for attribute in FUSED_ROUTER.attributes:
            value = values[attribute.name]
            try:
                attribute.check(value)
            except ValueError as error:
                raise ValueError(f"FusedRouter: {error}") from None
            if attribute.kind == "float":
                values[attribute.name] = ctypes.c_float(float(value)).value
            elif attribute.choices == (0, 1):
                values[attribute.name] = bool(value)
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

    def check(self, experts: int | None, has_selection_bias: bool) -> None:
        """Checks the attributes against each other and against the number of experts.

        Args:
            experts: E, or None where it is not known yet.
            has_selection_bias: Whether the node has a selection_bias.

        Raises:
            ValueError: They do not go together; one sentence names the attribute, what was expected and what came.
        """
        for problem in (
            self._problem_with_experts(experts),
            self._problem_with_floats(),
            self._problem_with_bias(has_selection_bias),
            self._problem_with_sparse_mixer(has_selection_bias),
        ):
            if problem:
                raise ValueError(f"FusedRouter: {problem}")

    def _problem_with_experts(self, experts: int | None) -> str:
        if self.k < 1:
            return f"attribute 'k': expected at least 1, got {self.k}"
        if self.num_groups < 1:
            return f"attribute 'num_groups': expected at least 1, got {self.num_groups}"
        if not 1 <= self.topk_groups <= self.num_groups:
            return f"attribute 'topk_groups': expected 1 to num_groups = {self.num_groups}, got {self.topk_groups}"
        if self.group_score_top < 1:
            return f"attribute 'group_score_top': expected at least 1, got {self.group_score_top}"
        if experts is None:
            return ""
        if experts < 1:
            return f"input 'logits': expected at least 1 expert in its last dimension, got {experts}"
        if self.k > experts:
            return f"attribute 'k': expected 1 to {experts}, the number of experts, got {self.k}"
        if experts % self.num_groups:
            return f"attribute 'num_groups': expected a divisor of the {experts} experts, got {self.num_groups}"
        group_size = experts // self.num_groups
        if self.group_score_top > group_size:
            return (
                f"attribute 'group_score_top': expected 1 to {group_size}, the experts of a group, "
                f"got {self.group_score_top}"
            )
        if self.has_groups and self.topk_groups * group_size < self.k:
            return (
                f"attribute 'topk_groups': expected groups that hold at least k = {self.k} experts, "
                f"got {self.topk_groups} groups of {group_size}"
            )
        return ""

    def _problem_with_floats(self) -> str:
        if not (self.softcap >= 0.0 and math.isfinite(self.softcap)):
            return f"attribute 'softcap': expected a finite number of at least 0, got {self.softcap}"
        return ""

    def _problem_with_bias(self, has_selection_bias: bool) -> str:
        if self.bias_on == "logits" and not self.score_after_topk:
            return "attribute 'bias_on': expected 'score' without score_after_topk, got 'logits'"
        if self.weights_from == "selection" and has_selection_bias:
            return "attribute 'weights_from': expected 'scores' with a selection_bias, got 'selection'"
        return ""

    def _problem_with_sparse_mixer(self, has_selection_bias: bool) -> str:
        if self.score != "sparse_mixer":
            return ""
        if self.k != 2:
            return f"attribute 'k': expected 2 with score sparse_mixer, got {self.k}"
        if not (self.mixer_threshold >= 0.0 and math.isfinite(self.mixer_threshold)):
            return f"attribute 'mixer_threshold': expected a finite number of at least 0, got {self.mixer_threshold}"
        if self.score_after_topk:
            return "attribute 'score_after_topk': expected 0 with score sparse_mixer, got 1"
        if self.has_groups:
            return f"attribute 'topk_groups': expected num_groups with score sparse_mixer, got {self.topk_groups}"
        if has_selection_bias:
            return "input 'selection_bias': expected none with score sparse_mixer, got one"
        if self.weights_from == "selection":
            return "attribute 'weights_from': expected 'scores' with score sparse_mixer, got 'selection'"
        return ""
