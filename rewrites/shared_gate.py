"""FusedRouter(x @ W), Sigmoid(x @ w) -> SharedGateRouter(x @ W, x, w), its columns sliced apart; and back.

The gate of a shared expert in the launch of the router, whose hidden rows it reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.node_kinds import experts_inputs, is_experts, is_shared_gate_router
from ort_moe.graphs.operators import RESHAPING
from ort_moe.ops import DOMAIN, FUSED_ROUTER, SHARED_GATE_ROUTER, VERSION
from ort_moe.rewrites.canonicalize import put_in_order
from ort_moe.rewrites.experts.node import Writer
from ort_moe.rewrites.experts.residual import kind_of_residual
from ort_moe.rewrites.experts.tokens import choice_behind
from ort_moe.rewrites.names import Names, take_over
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.rule import RuleInfo
from ort_moe.rewrites.tidy import discard
from ort_moe.rewrites.values import dim, integer, integers, is_op, operands, producer, rank, through

RULE = RuleInfo(
    "shared-gate",
    "FusedRouter(x @ W), Sigmoid(x @ w) -> SharedGateRouter(x @ W, x, w)",
    """\
Where the sigmoid weighs the shared expert beside the router's experts, and both read the same rows. The product of the
gate is summed in float32. Not run unless it is asked for, with `+shared-gate` among the rules: the slices that bring
the columns apart take most of what the launch saves.""",
)

_JOINED = f"{DOMAIN}.shared_gate"
"""Key in the `metadata_props` of a SharedGateRouter that this rule made."""

_SHARED_ATTRIBUTES = frozenset({"shared_scale", "shared_base"})


@dataclass(frozen=True)
class _Gate:
    """A router and the gate of the shared expert beside its experts.

    Attributes:
        router: The router.
        experts: E.
        hidden: The rows (T, H) that the logits and the gate are products of.
        product: The node that makes the gate's.
        sigmoid: What follows it.
    """

    router: Router
    experts: int
    hidden: ir.Value
    product: ir.Node
    sigmoid: ir.Node


def join_shared_gates(model: ir.Model, *, every: bool, again: Collection[str | None]) -> int:
    """Turn routers and gates of shared experts into SharedGateRouters, in place; how many.

    Args:
        model: Whose experts have been fused.
        every: All; else those alone that were before.
        again: Names of the routers that were.
    """
    found = [gate for node in model.graph.all_nodes() if is_experts(node) and (gate := _read(node)) is not None]
    names = Names(model.graph)
    joined = 0
    for gate in found:
        is_there = gate.router.node.graph is not None and gate.sigmoid.graph is not None  # not shared by another
        if is_there and (every or gate.router.node.name in again):
            _join(gate, names)
            joined += 1
    if joined:
        put_in_order(model)
    return joined


def split_shared_gates(model: ir.Model) -> frozenset[str | None]:
    """Turn what `join_shared_gates` made into routers and gates again, in place; the names of the routers."""
    joined = [
        node for node in model.graph.all_nodes() if is_shared_gate_router(node) and _JOINED in node.metadata_props
    ]
    names, called = Names(model.graph), {node: node.name for node in joined}
    split = frozenset(called[node] for node in joined if _split(node, names))
    if split:
        put_in_order(model)
    return split


def _read(experts: ir.Node) -> _Gate | None:
    """The router of a FusedExperts and the gate in its residual, if one node may do both."""
    if kind_of_residual(experts) != "gated":
        return None
    given = experts_inputs(experts)
    choice = choice_behind(given["indices"])
    node = None if choice is None else choice[0].producer()
    sigmoid = _sigmoid(given["residual"])
    if node is None or not is_router(node) or sigmoid is None or sigmoid.graph is not node.graph:
        return None
    router, product = Router.read(node), producer(sigmoid.inputs[0], "Gemm", "MatMul")
    made_logits = producer(router.logits, "Gemm", "MatMul")
    if router.has_maps or router.experts is None or product is None or made_logits is None:
        return None
    if not _is_plain(product) or (made_logits.op_type == "Gemm" and integer(made_logits, "transA", 0)):
        return None
    (rows, weight), hidden = operands(product)[:2], operands(made_logits)[0]
    if through(rows, RESHAPING) is not through(hidden, RESHAPING):
        return None
    width = dim(hidden, -1)
    if width is None or dim(rows, -1) != width or sorted((dim(weight, 0) or 0, dim(weight, 1) or 0)) != [1, width]:
        return None
    values = (router.logits, hidden, rows, weight, sigmoid.outputs[0])
    if any(rank(value) != 2 or value.dtype != router.logits.dtype for value in values):
        return None
    return _Gate(router, router.experts, hidden, product, sigmoid)


def _sigmoid(residual: ir.Value) -> ir.Node | None:
    """The sigmoid of one number a row by which a residual is multiplied."""
    product = producer(through(residual, RESHAPING | {"Cast"}), "Mul")
    for share in () if product is None else operands(product):
        if dim(share, -1) == 1 and (found := producer(through(share, RESHAPING | {"Cast"}), "Sigmoid")) is not None:
            return found
    return None


def _is_plain(product: ir.Node) -> bool:
    """Whether a product adds nothing and scales nothing."""
    if product.op_type == "MatMul":
        return True
    factors = [product.attributes[name].as_float() for name in ("alpha", "beta") if name in product.attributes]
    return integer(product, "transA", 0) == 0 and len(operands(product)) == 2 and all(each == 1.0 for each in factors)


def _join(gate: _Gate, names: Names) -> None:
    router, k = gate.router, gate.router.k
    old, graph = router.node, router.node.graph
    assert isinstance(graph, ir.Graph)
    writer = Writer(graph, old, names)
    weight = operands(gate.product)[1]
    if gate.product.op_type == "MatMul" or not integer(gate.product, "transB", 0):
        shape = writer.integers([1, -1], "gate_shape")
        weight = writer.insert("Reshape", [weight, shape], {}, weight.dtype, ir.Shape([1, dim(weight, 0)]))
    inputs: list[ir.Value | None] = [router.logits, gate.hidden, weight, router.selection_bias, router.expert_scale]
    while inputs[-1] is None:
        inputs.pop()
    attributes = SHARED_GATE_ROUTER.complete({**router.attributes, "shared_base": gate.experts})
    node = ir.node(SHARED_GATE_ROUTER.name, inputs, dict(attributes), domain=DOMAIN, version=VERSION, num_outputs=2)
    node.metadata_props.update({**old.metadata_props, _JOINED: ""})
    weights, indices = writer.put(node)
    name, old.name = old.name, None
    node.name = name
    for value, like in ((weights, router.weights), (indices, router.indices)):
        value.type = like.type
        value.shape = None if like.shape is None else ir.Shape([*like.shape[:-1], k + 1])
    sigmoid = gate.sigmoid.outputs[0]
    share = _slice(writer, weights, k, k + 1, sigmoid.shape)
    if sigmoid.dtype is not None:
        share = writer.cast(share, sigmoid.dtype)
    take_over(router.weights, _slice(writer, weights, 0, k, router.weights.shape))
    take_over(router.indices, _slice(writer, indices, 0, k, router.indices.shape))
    take_over(sigmoid, share)
    discard(old)
    discard(gate.sigmoid)


def _slice(writer: Writer, value: ir.Value, start: int, end: int, shape: ir.Shape | None) -> ir.Value:
    bounds = [writer.integers([number], "column") for number in (start, end, -1)]
    return writer.insert("Slice", [value, *bounds], {}, value.dtype, shape)


def _split(node: ir.Node, names: Names) -> bool:
    k, graph = int(node.attributes["k"].value), node.graph
    logits, hidden, weight, *vectors = node.inputs
    slices = [use for value in node.outputs for use in value.consumers() if is_op(use, "Slice")]
    if len(slices) != sum(len(value.uses()) + value.is_graph_output() for value in node.outputs):
        return False
    by_start = {(use.inputs[0], *(integers(use.inputs[1]) or ())): use for use in slices}
    weights, indices = (by_start.get((value, 0)) for value in node.outputs[:2])
    share = by_start.get((node.outputs[0], k))
    if weights is None or indices is None or share is None or len(slices) != 3 or not isinstance(graph, ir.Graph):
        return False
    if logits is None or hidden is None or weight is None:
        return False
    last = share
    if share.outputs[0].dtype != hidden.dtype:
        casts = [use for use in share.outputs[0].consumers() if is_op(use, "Cast")]
        if len(casts) != 1 or len(share.outputs[0].uses()) != 1:
            return False
        (last,) = casts
    writer = Writer(graph, node, names)
    attributes = {name: attribute for name, attribute in node.attributes.items() if name not in _SHARED_ATTRIBUTES}
    router = ir.Node(
        DOMAIN, FUSED_ROUTER.name, [logits, *vectors], list(attributes.values()), version=VERSION, num_outputs=2
    )
    router.metadata_props.update({name: text for name, text in node.metadata_props.items() if name != _JOINED})
    made = writer.put(router)
    router.name, node.name = node.name, None
    ends = (weights.outputs[0], indices.outputs[0])
    for value, end in zip(made, ends, strict=True):
        value.type, value.shape = end.type, end.shape
        take_over(end, value)
    result = last.outputs[0]
    product = writer.insert("Gemm", [hidden, weight], {"transB": 1}, hidden.dtype, result.shape)
    take_over(result, writer.insert("Sigmoid", [product], {}, hidden.dtype, result.shape))
    for node_behind in (weights, indices, last):
        discard(node_behind)
    return True
