"""FusedExperts(x, FusedRouter(logits), ...) -> com.microsoft::MoE(x, logits, ...), or QMoE: for `--target contrib`.

Where ONNX Runtime's kernels for the CPU and for CUDA compute the same: a softmax router, an activation that both know,
weights in an order that versions do not read differently. The CPU's kernels take gate and value interleaved, so that is
how they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.graphs.node_kinds import CONTRIB, experts_inputs, is_experts
from ort_moe.graphs.operators import RESHAPING
from ort_moe.ops import ROUTING_MAPS, AttributeValue
from ort_moe.rewrites.contrib_experts.sources import (
    Source,
    constant_source,
    interleaved,
    register,
    require_unshared,
)
from ort_moe.rewrites.experts.node import Writer
from ort_moe.rewrites.names import Names, take_over
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.rule import Refusal, reader_name
from ort_moe.rewrites.tidy import discard
from ort_moe.rewrites.values import consumers, dim, is_op, label, rank, through_widening

NO_FORM = "no-contrib-form"
"""Slug of the reason why a block has no contrib node."""

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu", "relu": "relu", "identity": "identity"}
"""Of layers without a gate: those that all of ONNX Runtime's kernels know."""
_BITS = {"int4": 4, "int8": 8}
_LEAST_NORMALISER = 2.0**-26
"""Beside a sum of 1, what is smaller is rounded away in float32."""
_MOE_ORDER = ("input", "router_probs", "fc1_weights", "fc1_bias", "fc2_weights", "fc2_bias")
_QMOE_ORDER = (
    "input", "router_probs", "fc1_weights", "fc1_scales", "fc1_bias", "fc2_weights", "fc2_scales", "fc2_bias", "", "",
    "", "fc1_zero_points", "fc2_zero_points", "", "router_weights", "fc1_global_scale", "fc2_global_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A contrib node to be written.

    Attributes:
        node: The FusedExperts in whose place it goes.
        router: The FusedRouter that it takes in.
        x: (T, H) or (B, S, H).
        logits: In the type of x.
        attributes: Of the contrib node.
        constants: What it takes, by the names of FusedExperts' inputs.
        residual: What is added to its result, or None.
    """

    node: ir.Node
    router: Router
    x: ir.Value
    logits: ir.Value
    attributes: Mapping[str, AttributeValue]
    constants: Mapping[str, Source]
    residual: ir.Value | None


def plan(node: ir.Node) -> Plan:
    """The contrib node that computes what a FusedExperts and its FusedRouter do.

    Raises:
        Refusal: There is none.
    """
    given = experts_inputs(node)
    attributes: dict[str, AttributeValue] = {name: attribute.value for name, attribute in node.attributes.items()}
    router = _router(node, given)
    x = given["x"]
    if rank(x) not in (2, 3) or x.dtype is None:
        raise _refusal(f"its rows '{x.name}' are of rank {rank(x)}, a contrib node takes 2 or 3")
    if any(tensor.name in given for tensor in ROUTING_MAPS):
        raise _refusal("its experts take routing maps")
    if attributes["weight_on"] != "output":
        raise _refusal("the mixing weights multiply what the experts take")
    normalize = _normalizes(router)
    kind = str(attributes["weight_format"])
    constants = {
        name: constant_source(value, f"the {name.replace('_', ' ')}")
        for name, value in given.items()
        if name.startswith(("fc1_", "fc2_"))
    }
    written = {**activation(attributes), "k": router.k, "normalize_routing_weights": normalize}
    constants = with_gates_interleaved(attributes, constants)
    if kind in _BITS:
        if not normalize:
            raise _refusal("its weights are not normalised, which ONNX Runtime's CPU kernel for integers always does")
        written |= integer_packing(attributes)
    elif kind != "dense":
        raise _refusal(f"ONNX Runtime's kernels and versions do not read weights in {kind} in one way")
    require_unshared([*constants.values()], node)
    return Plan(node, router, x, _logits(router, x.dtype), written, constants, given.get("residual"))


def write(planned: Plan, names: Names) -> ir.Node:
    """Put the contrib node in the place of the two, in their graph."""
    node, router, x = planned.node, planned.router, planned.x
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    writer = Writer(graph, node, names)
    assert x.dtype is not None
    width = dim(router.logits, -1) or planned.constants["fc1_weights"].shape[0]
    logits = writer.rows(writer.cast(planned.logits, x.dtype), width)
    constants = {name: register(graph, source, "interleaved", names) for name, source in planned.constants.items()}
    contrib = contrib_node({"input": x, "router_probs": logits, **constants}, planned.attributes, node.name)
    graph.insert_before(node, contrib)
    result, y = contrib.outputs[0], node.outputs[0]
    result.type, result.shape = y.type, y.shape
    if planned.residual is not None:
        result.name = names.unused("val")
        result = writer.insert("Add", [result, planned.residual], {}, x.dtype, y.shape)
    take_over(y, result)
    discard(node)
    return contrib


def contrib_node(given: Mapping[str, ir.Value], attributes: Mapping[str, AttributeValue], name: str | None) -> ir.Node:
    """A MoE, or where the attributes say how weights are packed, a QMoE.

    Args:
        given: Its inputs: weights and their parts by the names of FusedExperts', others by their own.
        attributes: Its attributes.
        name: Its name.
    """
    op_type, order = ("QMoE", _QMOE_ORDER) if "quant_type" in attributes else ("MoE", _MOE_ORDER)
    inputs = [given.get(each) for each in order]
    while inputs[-1] is None:
        inputs.pop()
    return ir.node(op_type, inputs, dict(attributes), domain=CONTRIB, version=1, name=name or None)


def _router(node: ir.Node, given: Mapping[str, ir.Value]) -> Router:
    """The FusedRouter whose choice, and nothing else, weighs and selects the experts."""
    weights, indices = _behind(given["weights"]), _behind(given["indices"])
    made_by = weights.producer()
    if made_by is None or not is_router(made_by) or indices.producer() is not made_by:
        raise _refusal("what weighs and selects its experts is not made by one router alone")
    router = Router.read(made_by)
    if weights is not router.weights or indices is not router.indices:
        raise _refusal("what weighs and selects its experts is not made by one router alone")
    others = [user for value in made_by.outputs for user in _readers(value) if user is not node]
    if others or any(value.is_graph_output() for value in made_by.outputs):
        told = ", ".join(map(reader_name, others)) or "an output of the model"
        raise Refusal(f"the choice of {label(made_by)} is also read by {told}", NO_FORM, others)
    return router


def _behind(value: ir.Value) -> ir.Value:
    """The value before views and casts."""
    while (node := value.producer()) is not None and is_op(node, "Cast", *RESHAPING) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _readers(value: ir.Value) -> list[ir.Node]:
    """What reads a value, or a view or cast of it."""
    found: list[ir.Node] = []
    for user in consumers(value):
        if is_op(user, "Cast", *RESHAPING) and not user.outputs[0].is_graph_output():
            found += _readers(user.outputs[0])
        else:
            found.append(user)
    return found


def _normalizes(router: Router) -> int:
    """Whether the chosen weights sum up to 1; refused where the contrib ops have no such router."""
    attributes = router.attributes
    if attributes["score"] != "softmax":
        raise _refusal(f"its score is {attributes['score']}; the contrib ops know softmax alone")
    for name, why in (
        ("selection_bias", "the choice is made with a bias"),
        ("expert_scale", "its weights are scaled for each expert"),
    ):
        if getattr(router, name) is not None:
            raise _refusal(f"{why}, which the contrib ops have not")
    if router.has_groups:
        raise _refusal("its choice is among groups, which the contrib ops have not")
    if attributes["scale"] != 1.0 or attributes["softcap"] != 0.0:
        raise _refusal("its logits are capped or its weights scaled, which the contrib ops do not do")
    over_chosen = bool(attributes["score_after_topk"])
    if attributes["weights_from"] != "scores" and not over_chosen:
        raise _refusal("its weights are the logits themselves")
    if attributes["normalize"]:
        # The largest K of E probabilities sum up to K / E at least.
        least = 1.0 if over_chosen else router.k / (router.experts or 1 << 30)
        eps, bound = float(attributes["normalize_eps"]), float(attributes["normalize_min"])
        if not (0.0 <= eps <= least * _LEAST_NORMALISER and bound <= least):
            raise _refusal("its weights are divided by more than their sum")
    return int(over_chosen or bool(attributes["normalize"]))


def integer_packing(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """How a QMoE says that its weights are those of a FusedExperts in int4 or int8."""
    return {
        "quant_type": "int",
        "expert_weight_bits": _BITS[str(attributes["weight_format"])],
        "block_size": attributes["block_size"],
        "weights_prepacked": 0,
    }


def with_gates_interleaved(
    attributes: Mapping[str, AttributeValue], constants: Mapping[str, Source]
) -> dict[str, Source]:
    """The constants of a FusedExperts, with gate and value in turn if they are not."""
    if not attributes["gated"] or attributes["gate_layout"] == "interleaved":
        return dict(constants)
    whole = "fc1_global_scale"  # of an expert, not of its rows
    return {
        name: interleaved(source) if name.startswith("fc1_") and name != whole else source
        for name, source in constants.items()
    }


def activation(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """How a contrib node says what stands between the layers of a FusedExperts.

    Raises:
        Refusal: It cannot.
    """
    name = str(attributes["activation"])
    if attributes["gated"]:
        if name != "silu":
            raise _refusal(f"its gate's activation is {name}; all kernels of the contrib ops know silu alone")
        written: dict[str, AttributeValue] = {
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": float(attributes["alpha"]),
            "activation_beta": float(attributes["beta"]),
        }
        return written | ({"swiglu_limit": float(attributes["limit"])} if attributes["limit"] else {})
    if name not in _ACTIVATIONS or attributes["alpha"] != 1.0:
        raise _refusal(f"its activation is {name}, which not all kernels of the contrib ops know")
    return {"activation_type": _ACTIVATIONS[name]}


def _logits(router: Router, dtype: ir.DataType) -> ir.Value:
    """The logits, in the type of x, or in a narrower one that is widened to it."""
    logits = router.logits
    if logits.dtype == dtype:
        return logits
    source = through_widening(logits)
    if source.dtype == dtype or (dtype == ir.DataType.FLOAT and logits.dtype is not None):
        return source
    sentence = f"its logits '{logits.name}' are {logits.dtype}, its rows {dtype}; a contrib node takes one type"
    raise _refusal(sentence)


def _refusal(sentence: str) -> Refusal:
    return Refusal(sentence, NO_FORM)


def plan_all(model: ir.Model) -> tuple[dict[ir.Node, Plan], dict[ir.Node, Refusal]]:
    """For every FusedExperts of the graph, the contrib node that can be written, or why there is none."""
    plans: dict[ir.Node, Plan] = {}
    refused: dict[ir.Node, Refusal] = {}
    for node in model.graph.all_nodes():
        if not is_experts(node):
            continue
        try:
            if node.graph is not model.graph:
                raise _refusal("it is in a body of If, Loop or Scan, where no contrib nodes are written")
            plans[node] = plan(node)
        except Refusal as refusal:
            refused[node] = refusal
    return plans, refused
