"""The table of ops: one row an op, and everything else is derived from it.

The ONNX schemas, the op reference in the docs, the checks of attributes, the rewriter's complete attribute sets and the
test that compares the library's own description with Python's all read this table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DOMAIN = "ort_moe"
"""Operator domain of every op."""

VERSION = 1
"""Version of the domain; a model imports `ort_moe` with exactly this."""

RUNTIME_VERSION = 1000
"""Version that ONNX Runtime writes for each domain of custom ops it knows, used or not, into a model that it saves."""

AttributeKind = Literal["int", "float", "string"]
AttributeValue = int | float | str


@dataclass(frozen=True)
class Tensor:
    """An input or output of an op.

    Attributes:
        name: Its name, as the schema and the errors spell it.
        types: ONNX element types it may have, as in `float16`.
        shape: Its shape in the letters of the docs, as in `(..., E)`.
        doc: One sentence.
        optional: Whether a node may leave it out.
    """

    name: str
    types: tuple[str, ...]
    shape: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute of an op.

    Attributes:
        name: Its name.
        kind: `int`, `float` or `string`.
        doc: One sentence.
        neutral: The value that changes nothing; None where the user must choose. Helpers fill it in: on a node every
            attribute is required, because ORT reads a misspelt optional attribute as absent.
        choices: The allowed values of a string or a flag; empty where any value of the kind may stand.
        only_with: An attribute and a value of it; on other nodes this attribute has no effect and may be left out.
    """

    name: str
    kind: AttributeKind
    doc: str
    neutral: AttributeValue | None = None
    choices: tuple[AttributeValue, ...] = ()
    only_with: tuple[str, AttributeValue] | None = None

    def check(self, value: object) -> None:
        """Checks one value of this attribute by itself: its kind and its choices.

        Raises:
            ValueError: It is of another kind, not a number, or not among the choices.
        """
        kind, types = {
            "int": ("an int", (int,)),
            "float": ("a float", (int, float)),
            "string": ("a string", (str,)),
        }[self.kind]
        if not isinstance(value, types):
            expected = kind
        elif isinstance(value, float) and math.isnan(value):
            expected = "a number"
        elif self.choices and value not in self.choices:
            *others, last = (repr(choice) if isinstance(choice, str) else f"{choice:g}" for choice in self.choices)
            expected = f"{', '.join(others)} or {last}"
        else:
            return
        raise ValueError(f"attribute '{self.name}' must be {expected}, but is {value!r}")


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
        name: The operator type.
        doc: What it computes, in Markdown.
        inputs: In order; optional ones may be the empty name.
        outputs: In order.
        attributes: All attributes.
    """

    name: str
    doc: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]

    def attribute(self, name: str) -> Attribute:
        """The attribute of that name.

        Raises:
            KeyError: The op has none.
        """
        for attribute in self.attributes:
            if attribute.name == name:
                return attribute
        raise KeyError(f"{self.name} has no attribute '{name}'; it has {', '.join(a.name for a in self.attributes)}")

    def complete(self, given: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
        """A node's whole attribute set in sorted order: `given`, and the neutral value of each other attribute.

        Raises:
            KeyError: `given` names an attribute that the op has not.
            ValueError: An attribute without a neutral value is missing.
        """
        for name in given:
            self.attribute(name)
        full: dict[str, AttributeValue] = {}
        for attribute in sorted(self.attributes, key=lambda a: a.name):
            if attribute.name in given:
                full[attribute.name] = given[attribute.name]
            elif attribute.only_with is None or given.get(attribute.only_with[0]) == attribute.only_with[1]:
                if attribute.neutral is None:
                    raise ValueError(f"{self.name}: attribute '{attribute.name}' must be given")
                full[attribute.name] = attribute.neutral
        return full


ACTIVATION_TYPES = ("float", "float16", "bfloat16")

FUSED_ROUTER = Op(
    name="FusedRouter",
    doc="""\
Scores the experts, ranks them and returns the weights and indices of the best `k` of each row.

1. `x` = logits in float32; with a `softcap` above 0: `softcap * tanh(x / softcap)`.
2. The key that ranks an expert. With `score_after_topk`, or with score `none` or `sparse_mixer`: `x`. For `softmax`
   without bias and groups: `x`. Otherwise the float32 score. `selection_bias` is added in float32 to whichever it is
   (`bias_on = "logits"` says so of `x` and needs `score_after_topk`). Then, where `topk_groups < num_groups`, the group
   mask: a group's score is the sum of its `group_score_top` best keys; the `topk_groups` best groups stay (ranked like
   keys; equal scores: the lower group), the keys of the others become `group_fill`, and all are ranked together.
3. Ranking: +inf > finite > -inf > NaN, -0 equals +0, equal keys: the lower expert index. Always `k` distinct indices,
   best first.
4. `v` = the unbiased, unmasked score of the chosen (`weights_from = "scores"`), or their ranked key (`"selection"`,
   refused with a bias). With `score_after_topk` the score is taken over the `k` chosen only.
5. With `normalize`: `v / max(sum(v) + normalize_eps, normalize_min)`. Then times `scale`, then times
   `expert_scale[index]`. `softmax` with `normalize`, both limits 0, is the softmax over the chosen and computed so.
6. Every sum over experts has one order on every path and device, so the results are the same bits on CPU and CUDA: 128
   partial sums that start at +0, element e in number (e / 8) mod 128, each in ascending e, then added by a butterfly
   with strides 64, 32, 16, 8, 4, 2, 1. In a sum over the chosen, or over the best of a group, the other experts count
   as +0.
7. A NaN logit makes all `k` weights of its row NaN, while its indices stay distinct and ranked as above; infinities
   follow IEEE 754.

Scores: `softmax`; `sigmoid`; `sqrtsoftplus` = sqrt(log(1 + e^x)), linear above 20; `none` = x; `sparse_mixer` (k = 2):
the weight of each choice is its softmax over the experts within `mixer_threshold` of it, where the distance of expert e
from the best m is (m - x[e]) / max(|x[e]|, m), and the second choice is made without the first.

All arithmetic is float32 without contraction; exp, log1p and tanh are within 3 units in the last place. The float64
answer has the same indices wherever the keys are further apart than that rounding.

A softmax that is ranked as numbers makes ties of its own: the probabilities of logits more than about 88 below the
row's largest (in float16: 17) underflow to 0, and a TopK of them takes the lower index. `softmax` ranks by the
logits, so where fewer than `k` probabilities are above 0 the further indices can be others than such a TopK's: the
larger logits. Their weights are next to 0 in either.

Limits: 1 <= k <= E; `num_groups` divides E; `group_score_top` is at most the experts per group; with a group mask the
kept groups hold at least k experts. sparse_mixer takes neither `score_after_topk`, groups, a bias nor `"selection"`.
`k` up to 64 and E up to 4096 are tuned for, more is correct.""",
    inputs=(
        Tensor("logits", ACTIVATION_TYPES, "(..., E)", "Router logits, rank 1 or more."),
        Tensor("selection_bias", ("float",), "(E)", "Added to the keys for the choice, never to the weights.", True),
        Tensor("expert_scale", ("float",), "(E)", "Multiplies the weight of each chosen expert.", True),
    ),
    outputs=(
        Tensor("weights", ("float",), "(..., K)", "Mixing weights in rank order."),
        Tensor("indices", ("int32",), "(..., K)", "Chosen experts in rank order."),
    ),
    attributes=(
        Attribute("k", "int", "Experts chosen per row."),
        Attribute(
            "score",
            "string",
            "The score of an expert.",
            choices=("softmax", "sigmoid", "sqrtsoftplus", "none", "sparse_mixer"),
        ),
        Attribute(
            "mixer_threshold",
            "float",
            "sparse_mixer: the relative distance from the best up to which an expert shares in the softmax.",
            only_with=("score", "sparse_mixer"),
        ),
        Attribute("score_after_topk", "int", "1: rank the logits, then score the chosen alone.", 0, (0, 1)),
        Attribute("bias_on", "string", "What selection_bias is added to.", "score", ("score", "logits")),
        Attribute("num_groups", "int", "Groups of neighbouring experts; divides E.", 1),
        Attribute("topk_groups", "int", "Groups kept; equal to num_groups: no mask.", 1),
        Attribute("group_score_top", "int", "Best keys whose sum is the group's score; 1: the maximum.", 1),
        Attribute("group_fill", "float", "Key of the experts outside the kept groups.", -math.inf, (-math.inf, 0.0)),
        Attribute("weights_from", "string", "What the weights are taken from.", "scores", ("scores", "selection")),
        Attribute("normalize", "int", "1: divide the weights by their sum.", 0, (0, 1)),
        Attribute("normalize_eps", "float", "Added to the sum before the division.", 0.0),
        Attribute("normalize_min", "float", "Least divisor.", 0.0),
        Attribute("scale", "float", "Multiplies every weight.", 1.0),
        Attribute("softcap", "float", "Soft cap of the logits; 0: none.", 0.0),
    ),
)

OPS: Mapping[str, Op] = {op.name: op for op in (FUSED_ROUTER,)}
"""Every op by name."""
