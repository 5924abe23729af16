"""The FusedRouter node: read its attributes, and build its successor with a complete new set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ort_moe.graphs.node_kinds import is_router as is_router  # beside Router, for all who read one
from ort_moe.ops import DOMAIN, FUSED_ROUTER, VERSION, AttributeValue
from ort_moe.rewrites.values import Array, dim

NON_NEGATIVE_SCORES = frozenset({"softmax", "sigmoid", "sqrtsoftplus", "sparse_mixer"})
"""Scores whose weights are never below zero."""

# Bookkeeping on the nodes in `metadata_props`. The first two stay in the optimised model: they tell which TopK the node
# was and what it absorbed. The others serve to turn a node that did not grow back into its TopK.
TOPK = f"{DOMAIN}.topk"
ABSORBED = f"{DOMAIN}.absorbed"
TOPK_ATTRIBUTES = f"{DOMAIN}.topk_attributes"
TOPK_DTYPE = f"{DOMAIN}.topk_dtype"


@dataclass(frozen=True)
class Router:
    """A FusedRouter node, read.

    Attributes:
        node: The node.
        logits: Input 0, (..., E).
        selection_bias: Input 1, (E), or None.
        expert_scale: Input 2, (E), or None.
        attributes: All attributes as Python values.
    """

    node: ir.Node
    logits: ir.Value
    selection_bias: ir.Value | None
    expert_scale: ir.Value | None
    attributes: Mapping[str, AttributeValue]

    @classmethod
    def read(cls, node: ir.Node) -> Router:
        """Read a node for which `is_router` holds."""
        given = {name: _python_value(attribute) for name, attribute in node.attributes.items()}
        inputs = (*node.inputs, None, None)
        logits = inputs[0]
        if logits is None:
            raise ValueError(f"FusedRouter '{node.name}': input 'logits' is required, got none")
        return cls(node, logits, inputs[1], inputs[2], given)

    @classmethod
    def producing(cls, value: ir.Value) -> Router:
        """The router whose output `value` is."""
        node = value.producer()
        if node is None or not is_router(node):
            raise ValueError(f"'{value.name}' is not an output of a FusedRouter")
        return cls.read(node)

    @property
    def weights(self) -> ir.Value:
        """Output 0, float32 (..., K)."""
        return self.node.outputs[0]

    @property
    def indices(self) -> ir.Value:
        """Output 1, int32 (..., K)."""
        return self.node.outputs[1]

    @property
    def has_maps(self) -> bool:
        """Whether its routing maps, the further outputs, are read."""
        return any(value.uses() or value.is_graph_output() for value in self.node.outputs[2:])

    @property
    def experts(self) -> int | None:
        """E, where the graph tells it."""
        return dim(self.logits, -1)

    @property
    def k(self) -> int:
        """K."""
        return int(self.attributes["k"])

    @property
    def has_groups(self) -> bool:
        """Whether a group mask restricts the choice."""
        return int(self.attributes["topk_groups"]) < int(self.attributes["num_groups"])

    @property
    def has_raw_weights(self) -> bool:
        """Whether nothing but a score has been done to the chosen: not normalised, not scaled."""
        return self.attributes["normalize"] == 0 and self.attributes["scale"] == 1.0 and self.expert_scale is None

    @property
    def has_no_score(self) -> bool:
        """Whether x itself is ranked and weighs: no score yet, before or after the choice."""
        return self.attributes["score"] == "none" and self.attributes["score_after_topk"] == 0

    @property
    def ranks_its_input(self) -> bool:
        """Whether the input as it is is ranked and weighs: neither a score nor a soft cap yet."""
        return self.has_no_score and self.attributes["softcap"] == 0.0

    @property
    def is_bare(self) -> bool:
        """Whether it computes what the TopK it came from computes, and no more."""
        return self.ranks_its_input and self.has_raw_weights and self.selection_bias is None and not self.has_groups

    @property
    def absorbed(self) -> tuple[str, ...]:
        """Names of the rules that grew it, in order."""
        names = self.node.metadata_props.get(ABSORBED, "")
        return tuple(names.split(",")) if names else ()

    def grow(
        self,
        op: Any,
        rule: str,
        *,
        logits: ir.Value | None = None,
        selection_bias: ir.Value | None = None,
        expert_scale: ir.Value | None = None,
        **changes: AttributeValue,
    ) -> tuple[ir.Value, ir.Value]:
        """Build the node that also does what `changes` and the given inputs say; everything else stays as it is.

        Returns:
            Its weights and indices, typed and shaped like this node's.
        """
        if logits is not None:
            take_width(logits, self.logits)  # no rule changes the shape of what is ranked
        weights, indices = build(
            op,
            self.logits if logits is None else logits,
            self.selection_bias if selection_bias is None else selection_bias,
            self.expert_scale if expert_scale is None else expert_scale,
            {**self.attributes, **changes},
        )
        weights.shape, indices.shape = self.weights.shape, self.indices.shape
        node = weights.producer()
        assert node is not None
        node.name = self.node.name
        node.metadata_props.update(self.node.metadata_props)
        node.metadata_props[ABSORBED] = ",".join((*self.absorbed, rule))
        return weights, indices


def take_width(value: ir.Value, other: ir.Value) -> None:
    """Give a value whose last dimension is not known the shape of another that must be shaped alike.

    Shape inference runs forward alone: what a mask or a bias tells of the number of experts does not reach the logits.
    """
    if dim(value, -1) is None and dim(other, -1) is not None and not value.is_graph_input():
        value.shape = other.shape


def build(
    op: Any,
    logits: ir.Value,
    selection_bias: ir.Value | None,
    expert_scale: ir.Value | None,
    attributes: Mapping[str, AttributeValue],
) -> tuple[ir.Value, ir.Value]:
    """Build a FusedRouter with the complete, sorted attribute set of its canonical form."""
    inputs: list[ir.Value | None] = [logits, selection_bias, expert_scale]
    while inputs[-1] is None:
        inputs.pop()
    full = FUSED_ROUTER.complete(canonical(attributes, biased=selection_bias is not None))
    weights, indices = op.FusedRouter(*inputs, **full, _domain=DOMAIN, _version=VERSION, _outputs=2)
    weights.dtype, indices.dtype = ir.DataType.FLOAT, ir.DataType.INT32
    return weights, indices


def canonical(attributes: Mapping[str, AttributeValue], *, biased: bool) -> dict[str, AttributeValue]:
    """The one spelling of a configuration, so that equal routers become equal nodes.

    - Limits of a normalisation that is off are neutral; the least divisor of weights that cannot be negative is at
      least 0, which is what `-inf` (right for any sign) means for them.
    - A mask that keeps all groups is no mask.
    - Without bias and mask, the ranked key of an expert *is* its score, except that softmax is ranked by x.
    """
    result = dict(attributes)
    defaults = {a.name: a.neutral for a in FUSED_ROUTER.attributes if a.neutral is not None}

    def reset(*names: str) -> None:
        result.update({name: defaults[name] for name in names})

    def get(name: str) -> AttributeValue:
        return result.get(name, defaults.get(name, 0))

    if get("normalize") == 0:
        reset("normalize_eps", "normalize_min")
    elif (
        get("score") in NON_NEGATIVE_SCORES and get("normalize_min") == -math.inf and float(get("normalize_eps")) >= 0.0
    ):
        result["normalize_min"] = 0.0
    if get("topk_groups") == get("num_groups"):
        reset("num_groups", "topk_groups", "group_score_top", "group_fill")
        if get("weights_from") == "selection" and get("score") != "softmax" and not biased:
            reset("weights_from")
    return result


def float32_initializer(op: Any, name: str, array: Array) -> ir.Value:
    """A new float32 initializer; the engine makes its name unique."""
    value: ir.Value = op.initializer(ir.tensor(array, dtype=ir.DataType.FLOAT, name=name), name=name)
    return value


def _python_value(attribute: ir.Attr) -> AttributeValue:
    value = attribute.value
    return value if isinstance(value, str) else int(value) if attribute.type == ir.AttributeType.INT else float(value)
