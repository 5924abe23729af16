"""com.microsoft::MoE(x, logits, ...) -> FusedExperts(x, FusedRouter(logits), ...), and the same of QMoE."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.node_kinds import is_contrib_moe
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, FUSED_ROUTER, VERSION, AttributeValue
from ort_moe.rewrites.contrib_experts.block import ContribBlock, read, require_weights_of_one_sign
from ort_moe.rewrites.contrib_experts.masked_choice import MaskedChoice, read_masked_choice
from ort_moe.rewrites.contrib_experts.sources import register, require_unshared
from ort_moe.rewrites.contrib_experts.speed import LayerSize, why_slower
from ort_moe.rewrites.experts.node import FORM, Writer
from ort_moe.rewrites.names import Names, new_constant, take_over
from ort_moe.rewrites.router_node import ABSORBED, canonical
from ort_moe.rewrites.rule import Refusal, RuleInfo
from ort_moe.rewrites.tidy import discard
from ort_moe.rewrites.values import rank

RULE = RuleInfo(
    "contrib-experts",
    "MoE(x, logits, W1, W2) -> FusedExperts(x, FusedRouter(logits), W1, W2)",
    "com.microsoft::MoE and QMoE, where all of ONNX Runtime's kernels read the node in one way and its weights are "
    "constants. Weights that FusedExperts takes in another order are written anew, one layer at a time. Where "
    "ONNX Runtime's own kernel is measured to be faster, the node stays.",
)

_LEAST_SUM = np.array(np.finfo(np.float32).smallest_normal, np.float32)
"""What a sum of weights is at least when they are divided by it: those of a sum of 0 stay 0, as in ONNX Runtime's
kernels. Smaller numbers may be flushed to 0, and their reciprocals be infinite."""


@dataclass(frozen=True)
class Lifted:
    """What came of the contrib nodes of a model.

    Attributes:
        fused: The FusedExperts in their places.
        refused: Why the others stay, by node.
        seconds: Wall time.
    """

    fused: tuple[ir.Node, ...]
    refused: dict[ir.Node, Refusal]
    seconds: float


def lift_contrib(model: ir.Model, chosen: Collection[str], target: str) -> Lifted:
    """Take apart, in place, every contrib node that can be: into a router and its experts.

    Args:
        model: In canonical form.
        chosen: Names of the rules to run.
        target: Where the model shall run.
    """
    start = time.perf_counter()
    fused: list[ir.Node] = []
    refused: dict[ir.Node, Refusal] = {}
    names: Names | None = None
    for node in [node for node in model.graph.all_nodes() if is_contrib_moe(node)]:
        try:
            if RULE.name not in chosen:
                raise Refusal(f"the rule {RULE.name} was left out", "rule-left-out")
            if node.graph is not model.graph:
                raise Refusal("it is in a body of If, Loop or Scan", "experts-in-subgraph")
            block = read(node, target)
            require_weights_of_one_sign(block)
            slower = why_slower(target, block.weight_format, LayerSize(block.k, block.hidden, block.inner))
            if slower is not None and not _lacks_kernel(block, target):
                raise Refusal(slower, "contrib-is-faster")
            require_unshared([*block.layers.values()], node)
        except Refusal as refusal:
            refused[node] = refusal
            continue
        names = names or Names(model.graph)
        fused.append(_replace(block, names))
    return Lifted(tuple(fused), refused, time.perf_counter() - start)


def _lacks_kernel(block: ContribBlock, target: str) -> bool:
    """Whether ONNX Runtime has no kernel for the node there: QMoE on CUDA takes rows in half precision alone."""
    return target == "cuda" and block.node.op_type == "QMoE" and block.dtype == ir.DataType.FLOAT


def _replace(block: ContribBlock, names: Names) -> ir.Node:
    node = block.node
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    writer = _Writer(graph, node, names)
    x, logits = block.x, block.logits
    masked = read_masked_choice(node, logits, block.k) if block.normalize and block.router_weights is None else None
    y = (node if masked is None else masked.product).outputs[0]
    for value, shape in ((x, None), (logits, ir.Shape([None, block.experts])), (y, x.shape)):
        value.type = value.type or ir.TensorType(block.dtype)
        value.shape = value.shape or shape
    if masked is not None:
        weights, indices = writer.unmasked(masked)
    else:
        weights, indices = writer.softmax(block) if block.router_weights is None else writer.choice(block)
    rows = x if rank(x) == 2 else writer.rows(x, block.hidden)
    given = {"x": rows, "weights": weights, "indices": indices}
    for name, source in block.layers.items():
        given[name] = register(graph, source, name.split("_", 1)[1], names)
    inputs = [given.get(tensor.name) for tensor in FUSED_EXPERTS.inputs]
    while inputs[-1] is None:
        inputs.pop()
    experts = ir.node(
        FUSED_EXPERTS.name, inputs, dict(block.attributes), domain=DOMAIN, version=VERSION, name=node.name or None
    )
    experts.metadata_props.update(node.metadata_props)
    experts.metadata_props[FORM] = RULE.name
    graph.insert_before(node, experts)
    result = experts.outputs[0]
    result.type, result.shape = ir.TensorType(block.dtype), rows.shape
    if rows is not x:
        result.name = names.unused("val")
        result = writer.like(result, x)
    result.type, result.shape = y.type, y.shape
    take_over(y, result)
    discard(node if masked is None else masked.product)
    return experts


class _Writer(Writer):
    """Inserts what stands in front of the FusedExperts, and the view behind it."""

    def softmax(self, block: ContribBlock) -> tuple[ir.Value, ir.Value]:
        """The choice by a FusedRouter: weights and indices."""
        given: dict[str, AttributeValue] = {"k": block.k, "score": "softmax", "normalize": int(block.normalize)}
        attributes = FUSED_ROUTER.complete(canonical(given, biased=False))
        router = ir.node(
            FUSED_ROUTER.name, [block.logits], dict(attributes), domain=DOMAIN, version=VERSION, num_outputs=2
        )
        router.metadata_props[ABSORBED] = RULE.name
        weights, indices = self.put(router, f"{block.node.name}_router")
        for value, dtype in ((weights, ir.DataType.FLOAT), (indices, ir.DataType.INT32)):
            value.type, value.shape = ir.TensorType(dtype), _choice_shape(block)
        return weights, indices

    def choice(self, block: ContribBlock) -> tuple[ir.Value, ir.Value]:
        """The choice by standard operators: some router's rules make a FusedRouter of it and of what is before it."""
        topk = ir.node("TopK", [block.logits, self.integers([block.k], "k")], {"axis": -1}, num_outputs=2)
        best, ids = self.put(topk, f"{block.node.name}_topk")
        best.type, ids.type = ir.TensorType(block.dtype), ir.TensorType(ir.DataType.INT64)
        best.shape = ids.shape = _choice_shape(block)
        assert block.router_weights is not None
        weights = self.insert("GatherElements", [block.router_weights, ids], {"axis": -1}, block.dtype, ids.shape)
        if block.dtype != ir.DataType.FLOAT:
            weights = self.insert("Cast", [weights], {"to": ir.DataType.FLOAT}, ir.DataType.FLOAT, ids.shape)
        if block.normalize:
            axis, shape = self.integers([-1], "last"), ir.Shape([ids.shape[0], 1])
            total = self.insert("ReduceSum", [weights, axis], {"keepdims": 1}, ir.DataType.FLOAT, shape)
            least = new_constant(self._graph, self._names.unused("least_sum"), _LEAST_SUM)
            divisor = self.insert("Max", [total, least], {}, ir.DataType.FLOAT, shape)
            weights = self.insert("Div", [weights, divisor], {}, ir.DataType.FLOAT, ids.shape)
        return weights, self.insert("Cast", [ids], {"to": ir.DataType.INT32}, ir.DataType.INT32, ids.shape)

    def unmasked(self, choice: MaskedChoice) -> tuple[ir.Value, ir.Value]:
        """A choice that standard operators have made before: their rules make a FusedRouter of it."""
        shape = choice.scores.shape
        weights = self.insert("Div", [choice.scores, choice.divisor], {}, ir.DataType.FLOAT, shape)
        if choice.factor is not None:
            weights = self.insert("Mul", [weights, choice.factor], {}, ir.DataType.FLOAT, shape)
        return weights, self.cast(choice.indices, ir.DataType.INT32)

    def like(self, value: ir.Value, other: ir.Value) -> ir.Value:
        """The value in another's shape."""
        shape = self.insert("Shape", [other], {}, ir.DataType.INT64, None)
        # Without it a length of 0, such as that of no tokens, stands for the length that is there.
        plainly = {"allowzero": 1} if self._graph.opset_imports.get("", 0) >= 14 else {}
        return self.insert("Reshape", [value, shape], plainly, value.dtype, other.shape)


def _choice_shape(block: ContribBlock) -> ir.Shape:
    rows = None if block.logits.shape is None else block.logits.shape[0]
    return ir.Shape([rows, block.k])
