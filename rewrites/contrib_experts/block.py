"""What a com.microsoft::MoE or QMoE computes, read in the terms of FusedRouter and FusedExperts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.ops import FUSED_EXPERTS, AttributeValue
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.rewrites.contrib_experts.layers import (
    Given,
    Parts,
    Storage,
    joined,
    quant_type,
    read_bias,
    read_dense,
    storage_of,
)
from ort_moe.rewrites.contrib_experts.sources import Source, constant_source
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.signs import is_never_negative
from ort_moe.rewrites.values import FLOATS, dim, integer, rank

_MOE_INPUTS = (
    "input", "router_probs", "fc1_experts_weights", "fc1_experts_bias", "fc2_experts_weights", "fc2_experts_bias",
    "fc3_experts_weights", "fc3_experts_bias",
)  # fmt: skip
_QMOE_INPUTS = (
    "input", "router_probs", "fc1_experts_weights", "fc1_scales", "fc1_experts_bias", "fc2_experts_weights",
    "fc2_scales", "fc2_experts_bias", "fc3_experts_weights", "fc3_scales", "fc3_experts_bias", "fc1_zero_points",
    "fc2_zero_points", "fc3_zero_points", "router_weights", "fc1_global_scale", "fc2_global_scale", "fc1_act_scale",
    "fc2_act_scale", "fc1_act_block_scale", "fc2_act_block_scale",
)  # fmt: skip
_ATTRIBUTES = {
    "accuracy_level", "activation_alpha", "activation_beta", "activation_type", "block_size", "expert_weight_bits",
    "fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits", "k", "normalize_routing_weights",
    "quant_type", "swiglu_fusion", "swiglu_limit", "swiglu_limit_after_activation", "use_sparse_mixer",
    "weights_prepacked",
}  # fmt: skip
"""Those of ONNX Runtime 1.32; what others ask for is not known."""
_ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "identity": "identity",
    "swiglu": "silu",
    "gelu": "gelu_tanh",  # by the tanh approximation, as ONNX Runtime's kernels compute it
    "geglu": "gelu_tanh",
}
_FUSED = ("swiglu", "geglu")
"""Activations of a gate and a value."""


@dataclass(frozen=True)
class ContribBlock:
    """A contrib node, read.

    Attributes:
        node: The node.
        x: (T, H) or (B, S, H).
        logits: (T, E).
        router_weights: What weighs the chosen in place of the softmax of the logits, (T, E), or None.
        dtype: Of all three.
        k: K.
        normalize: Whether the weights of the chosen are divided by their sum.
        hidden: H.
        inner: I.
        experts: E.
        attributes: Of the FusedExperts.
        layers: Of the FusedExperts: what it takes by its inputs' names.
    """

    node: ir.Node
    x: ir.Value
    logits: ir.Value
    router_weights: ir.Value | None
    dtype: ir.DataType
    k: int
    normalize: bool
    hidden: int
    inner: int
    experts: int
    attributes: Mapping[str, AttributeValue]
    layers: Mapping[str, Source]

    @property
    def weight_format(self) -> str:
        """Of the FusedExperts."""
        return str(self.attributes["weight_format"])


def given_inputs(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs that the node has, by their names in the op's schema."""
    return {name: value for name, value in zip(_input_names(node), node.inputs, strict=False) if value is not None}


def _input_names(node: ir.Node) -> tuple[str, ...]:
    return _MOE_INPUTS if node.op_type == "MoE" else _QMOE_INPUTS


def read(node: ir.Node, target: str) -> ContribBlock:
    """Reads a node for which `is_contrib_moe` holds.

    Args:
        node: The node.
        target: Where the model shall run: on the CPU, integers that are not said to be raw are.

    Raises:
        Refusal: It computes what FusedRouter and FusedExperts do not, or how its weights lie cannot be told.
    """
    given = given_inputs(node)
    unknown = [f"attribute '{name}'" for name in node.attributes if name not in _ATTRIBUTES]
    unknown += [f"input '{value.name}'" for value in node.inputs[len(_input_names(node)) :] if value is not None]
    if unknown:
        raise Refusal(f"its {unknown[0]} is none that ONNX Runtime 1.32 knows", "contrib-form")
    for name in given:
        if name.startswith(("fc1_act", "fc2_act")):
            raise Refusal(f"its activations are quantised: it has '{name}'", "contrib-form")
    for name in ("use_sparse_mixer", "swiglu_limit_after_activation"):
        if value := integer(node, name, 0):
            raise Refusal(
                f"its attribute '{name}' is {value}, which only some of ONNX Runtime's kernels honour", "contrib-form"
            )
    if (normalize := integer(node, "normalize_routing_weights", 0)) not in (0, 1):
        raise Refusal(f"its normalize_routing_weights is {normalize}, and neither 0 nor 1", "contrib-form")
    _require_raw(node, target)
    if _mixes_otherwise(node) and "router_weights" not in given:
        sentence = (
            "with normalize_routing_weights = 0, ONNX Runtime's CPU kernel for integers normalises, and others do not"
        )
        raise Refusal(sentence, "contrib-form")
    if _weighs_otherwise(node) and "router_weights" in given:
        sentence = (
            "with normalize_routing_weights = 1, ONNX Runtime's CPU kernel for nvfp4 leaves router_weights as they are "
            "and that for integers normalises them"
        )
        raise Refusal(sentence, "contrib-form")
    x, logits = given["input"], given["router_probs"]
    first = constant_source(given["fc1_experts_weights"], "the weights of fc1")
    second = constant_source(given["fc2_experts_weights"], "the weights of fc2")
    dtype = _type(given)
    experts, hidden = first.shape[0], _hidden(x, given, second)
    fused = _is_fused(node)
    layers = [_layer(given, name) for name in ("fc1", "fc2", "fc3")]
    separate = layers[2].weights is not None
    inner = _inner(node, first, second, hidden)
    attributes = _activation(node, separate=separate)
    fc1_rows = 2 * inner if fused else inner
    present = layers if separate else layers[:2]
    storage = Storage("dense", 0, lambda given, n, d: read_dense(given, n, d, dtype))
    if node.op_type == "QMoE":
        storage = storage_of(node, present, (fc1_rows, hidden, inner), dtype)
    shapes = {"fc1": (fc1_rows, hidden), "fc2": (hidden, inner), "fc3": (inner, hidden)}
    read_layers: dict[str, Parts] = {}
    for layer in present:
        rows, depth = shapes[layer.name]
        parts = storage.read(layer, rows, depth) | read_bias(layer, experts, rows, dtype)
        for source in parts.values():
            if source.shape[0] != experts:
                sentence = f"'{source.base}' is of {source.shape[0]} experts, '{first.base}' of {experts}"
                raise Refusal(sentence, "experts-mismatch")
        read_layers[layer.name] = parts
    if separate:
        read_layers["fc1"] = joined(read_layers["fc1"], read_layers.pop("fc3"), storage)
    full = FUSED_EXPERTS.complete(
        {**attributes, "weight_format": storage.weight_format, "block_size": storage.block_size}
    )
    try:
        ExpertsConfig.from_attributes(full)
    except ValueError as error:
        raise Refusal(str(error), "contrib-form") from None
    return ContribBlock(
        node,
        x,
        logits,
        given.get("router_weights"),
        dtype,
        _choices(node, logits, experts),
        bool(integer(node, "normalize_routing_weights", 0)),
        hidden,
        inner,
        experts,
        full,
        {f"{name}_{part}": source for name, parts in read_layers.items() for part, source in parts.items()},
    )


def require_weights_of_one_sign(block: ContribBlock) -> None:
    """Refuse router weights that may be negative, where it matters: measured on ONNX Runtime 1.32.

    It is no part of `read`, which also serves to spell a node for the CPU, in whatever way the kernels take weights.

    Raises:
        Refusal: They may be.
    """
    weights, kind = block.router_weights, quant_type(block.node)
    if weights is None or is_never_negative(weights) or not (kind == "int" or block.normalize):
        return
    sentence = f"its router_weights '{weights.name}' may be negative: "
    if kind == "int":
        sentence += "ONNX Runtime's CPU kernel for integers drops such choices, and others multiply by their weights"
    else:
        sentence += "their sum, by which they are divided, may be zero between weights that are not"
    remedy = "Let an op end the weights that is never negative, such as Sigmoid, Softmax or Relu."
    raise Refusal(sentence, "contrib-form", remedy=remedy)


def _require_raw(node: ir.Node, target: str) -> None:
    """Refuse integers in the order of some execution provider's kernel."""
    if node.op_type != "QMoE" or quant_type(node) != "int":
        return
    prepacked = integer(node, "weights_prepacked", -1)
    if prepacked == 0 or (prepacked == -1 and target == "cpu"):
        return
    if prepacked == -1:
        sentence = (
            "without weights_prepacked = 0 its integers lie as they are for the CPU, and in another order for CUDA"
        )
        remedy = "Build the model with weights_prepacked = 0; where it was built for the CPU, use `--target cpu`."
        raise Refusal(sentence, "contrib-layout", remedy=remedy)
    sentence = f"weights_prepacked = {prepacked}: its integers lie as some execution provider's kernel wants them"
    raise Refusal(sentence, "contrib-layout", remedy="Build the model with weights_prepacked = 0.")


def _mixes_otherwise(node: ir.Node) -> bool:
    """Whether the kernels disagree on the weights of the chosen: measured on ONNX Runtime 1.32."""
    kind = quant_type(node)
    return node.op_type == "QMoE" and kind == "int" and not integer(node, "normalize_routing_weights", 0)


def _weighs_otherwise(node: ir.Node) -> bool:
    """Whether the kernels disagree on router weights: measured on ONNX Runtime 1.32."""
    kind = quant_type(node)
    return node.op_type == "QMoE" and kind == "nvfp4" and bool(integer(node, "normalize_routing_weights", 0))


def _type(given: Mapping[str, ir.Value]) -> ir.DataType:
    """Type of x, which shape inference does not know behind contrib ops."""
    names = ("input", "router_probs", "router_weights", "fc1_experts_bias", "fc2_experts_bias")
    known = [given[name].dtype for name in names if name in given and given[name].dtype is not None]
    if not known:
        known = [given["fc1_experts_weights"].dtype]
    dtype = known[0]
    if len(set(known)) != 1 or dtype not in FLOATS:
        told = ", ".join(map(str, dict.fromkeys(known)))
        raise Refusal(
            f"its rows, logits and biases are of type {told}, expected one floating-point type", "contrib-form"
        )
    return dtype


def _hidden(x: ir.Value, given: Mapping[str, ir.Value], fc2: Source) -> int:
    """H: the length of the rows, or where that is not known, as behind other contrib ops, what fc2 tells."""
    if rank(x) not in (None, 2, 3):
        raise Refusal(f"its rows '{x.name}' are of rank {rank(x)}, expected 2 or 3", "contrib-form")
    hidden = dim(x, -1) or dim(given.get("fc2_experts_bias"), -1)
    scales = given.get("fc2_scales")
    if hidden is None and (fc2.dtype in FLOATS or fc2.dtype == ir.DataType.FLOAT8E4M3FN):
        hidden = fc2.shape[1] if len(fc2.shape) == 3 else None
    elif hidden is None and scales is not None and scales.const_value is not None:
        hidden = dim(scales, 1)  # of blocks or of rows: in fc2, H in either case
    if hidden is None:
        raise Refusal(f"the length of its rows '{x.name}' is not fixed", "contrib-form")
    return hidden


def _inner(node: ir.Node, fc1: Source, fc2: Source, hidden: int) -> int:
    """I, by the number of fc2's weights, which no layout changes."""
    if len(fc1.shape) != 3 or len(fc2.shape) != 3:
        raise Refusal(f"its weights are of shapes {fc1.shape} and {fc2.shape}, expected rank 3", "contrib-form")
    stored = bits = fc2.dtype.bitwidth
    if node.op_type == "QMoE":
        integers = integer(node, "fc2_expert_weight_bits", integer(node, "expert_weight_bits", 4))
        bits = {"int": integers, "fp8": 8}.get(quant_type(node), 4)
    weights = fc2.shape[1] * fc2.shape[2] * stored // max(bits, 1)
    if not hidden or weights % hidden or not weights:
        raise Refusal(f"fc2 has {weights} weights for each expert, no multiple of {hidden} elements", "contrib-form")
    return weights // hidden


def _is_fused(node: ir.Node) -> bool:
    """Whether fc1 makes gate and value."""
    return node.attributes.get_string("activation_type", "relu") in _FUSED and integer(node, "swiglu_fusion", 0) != 0


def _activation(node: ir.Node, *, separate: bool) -> dict[str, AttributeValue]:
    """The attributes of a FusedExperts for what stands between the layers.

    Args:
        node: The node.
        separate: Whether an fc3 makes the value.
    """
    name, fusion = node.attributes.get_string("activation_type", "relu") or "", integer(node, "swiglu_fusion", 0)
    if name not in _ACTIVATIONS:
        raise Refusal(f"its activation is '{name}', expected {', '.join(_ACTIVATIONS)}", "contrib-form")
    attributes: dict[str, AttributeValue] = {"activation": _ACTIVATIONS[name], "gated": 0}
    if name in _FUSED:
        if separate == (fusion != 0) or fusion not in (0, 1, 2):
            where = "with" if separate else "without"
            raise Refusal(f"its activation is {name} with swiglu_fusion = {fusion} {where} an fc3", "contrib-form")
        attributes |= {"gated": 1, "gate_layout": "interleaved" if fusion == 1 else "concat"}
    elif fusion != 0:
        raise Refusal(f"its activation is {name} with swiglu_fusion = {fusion}", "contrib-form")
    elif separate and name != "silu":
        raise Refusal(
            f"its activation is {name} with an fc3; only silu and swiglu are known to take one", "contrib-form"
        )
    elif separate:
        attributes |= {"gated": 1, "gate_layout": "concat"}
    if name == "swiglu":
        limit = _float(node, "swiglu_limit", math.inf)
        if not limit > 0.0:
            raise Refusal(f"its swiglu_limit is {limit:g}, expected more than 0", "contrib-form")
        attributes |= {
            "alpha": _float(node, "activation_alpha", 1.0),
            "beta": _float(node, "activation_beta", 0.0),
            "limit": 0.0 if limit == math.inf else limit,
        }
    return attributes


def _choices(node: ir.Node, logits: ir.Value, experts: int) -> int:
    """K."""
    width, k = dim(logits, -1), integer(node, "k", 1)
    if rank(logits) not in (None, 2):
        raise Refusal(f"its logits '{logits.name}' are of rank {rank(logits)}, expected 2", "contrib-form")
    if width not in (None, experts):
        raise Refusal(
            f"its logits '{logits.name}' are of {width} experts, its weights of {experts}", "experts-mismatch"
        )
    if not 1 <= k <= experts:
        raise Refusal(f"it chooses {k} of {experts} experts", "contrib-form")
    return k


def _layer(given: Mapping[str, ir.Value], name: str) -> Given:
    return Given(
        name,
        given.get(f"{name}_experts_weights"),
        given.get(f"{name}_scales"),
        given.get(f"{name}_experts_bias"),
        given.get(f"{name}_zero_points"),
        given.get(f"{name}_global_scale"),
    )


def _float(node: ir.Node, name: str, default: float) -> float:
    return float(node.attributes.get_float(name, default) or 0.0)
