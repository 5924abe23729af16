"""ONNX schemas of the ops, from the op table: checking and shape inference of models that contain them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto, TensorShapeProto, TypeProto, defs
from onnx.shape_inference import InferenceContext, InferenceError

from ort_moe.ops import ACTIVATION_TYPES, DOMAIN, OPS, ROUTING_MAPS, VERSION, AttributeValue, Op, Tensor
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.ops.router_config import RouterConfig
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig, check_router_probs, router_probs_config

_OPTION = defs.OpSchema.FormalParameterOption
_ATTRIBUTE_TYPES = {
    "int": defs.OpSchema.AttrType.INT,
    "float": defs.OpSchema.AttrType.FLOAT,
    "string": defs.OpSchema.AttrType.STRING,
}


def register_schemas() -> None:
    """Registers the schema of every op with `onnx.defs`; those already there stay as they are."""
    for op in OPS.values():
        if not defs.has(op.name, VERSION, DOMAIN):
            defs.register_schema(schema_of(op))


def schema_of(op: Op) -> defs.OpSchema:
    """The schema of a row of the op table."""
    constraints = {}

    def parameter(tensor: Tensor) -> defs.OpSchema.FormalParameter:
        types = [f"tensor({name})" for name in tensor.types]
        type_name = types[0]
        if tensor.types == ACTIVATION_TYPES:
            type_name = "T"  # one for all of a node
            constraints[type_name] = (type_name, types, "Type of the activations.")
        elif len(types) > 1:
            type_name = f"T_{tensor.name}"
            constraints[type_name] = (type_name, types, f"Types of {tensor.name}.")
        option = _OPTION.Optional if tensor.optional else _OPTION.Single
        return defs.OpSchema.FormalParameter(tensor.name, type_name, tensor.doc, param_option=option)

    schema = defs.OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        op.doc,
        inputs=[parameter(tensor) for tensor in op.inputs],
        outputs=[parameter(tensor) for tensor in op.outputs],
        type_constraints=list(constraints.values()),
        attributes=[
            defs.OpSchema.Attribute(a.name, _ATTRIBUTE_TYPES[a.kind], a.doc, required=a.only_with is None)
            for a in op.attributes
        ],
    )
    schema.set_type_and_shape_inference_function(_INFERENCE[op.name])
    return schema


def _infer_fused_router(context: InferenceContext) -> None:
    """Checks the attributes and sets the outputs' types and shapes; unknown input types and shapes are left open."""
    op = OPS["FusedRouter"]
    logits = _input(context, 0)
    dims = _dims(op, 0, logits)
    experts = _size(dims, -1)
    for index in (1, 2):
        _check_vector(context, op, index, experts)
    attributes = _attributes(context, op)
    chosen = attributes.get("k")
    if _required(op) <= attributes.keys():  # a missing one is the checker's to report
        try:
            config = RouterConfig.from_attributes(attributes)
            config.check(experts, has_selection_bias=_input(context, 1) is not None)
        except ValueError as error:
            raise InferenceError(str(error)) from None
    maps = range(2, 2 + len(ROUTING_MAPS))
    _check_all_or_none(op, "output", {op.outputs[i].name: context.has_output(i) for i in maps})

    _set_router_outputs(context, dims, chosen if isinstance(chosen, int) else None, experts)


def _infer_shared_gate_router(context: InferenceContext) -> None:
    """As of a FusedRouter, with a column and an expert more for each row of gate_weight."""
    op = OPS["SharedGateRouter"]
    dims, hidden, gates = (_dims(op, index, _input(context, index)) for index in range(3))
    experts, shared = _size(dims, -1), _size(gates, 0)
    for index in (3, 4):
        _check_vector(context, op, index, experts)
    if gates is not None and (len(gates) != 2 or shared == 0):
        raise InferenceError(f"{op.name}: input 'gate_weight' must be a matrix with a row for each shared expert")
    if _differ(_size(gates, -1), _size(hidden, -1)):
        raise InferenceError(f"{op.name}: inputs 'hidden' and 'gate_weight' must have the same last dimension")
    attributes = _attributes(context, op)
    if _required(op) <= attributes.keys():
        given = {name: value for name, value in attributes.items() if name not in ("shared_scale", "shared_base")}
        try:
            config = RouterConfig.from_attributes(given)
            config.check(experts, has_selection_bias=_input(context, 3) is not None)
        except ValueError as error:
            raise InferenceError(str(error).replace(OPS["FusedRouter"].name, op.name, 1)) from None
    maps = range(2, 2 + len(ROUTING_MAPS))
    _check_all_or_none(op, "output", {op.outputs[i].name: context.has_output(i) for i in maps})
    chosen = attributes.get("k")
    columns = chosen + shared if isinstance(chosen, int) and shared is not None else None
    all_experts = None if experts is None or shared is None else experts + shared
    _set_router_outputs(context, dims, columns, all_experts)


def _infer_permute_tokens(context: InferenceContext) -> None:
    """Sets the outputs: a row for each choice, of the columns and the type of x, and the maps."""
    op = OPS["PermuteTokens"]
    x, indices = _input(context, 0), _input(context, 1)
    columns, choices = _dims(op, 0, x), _dims(op, 1, indices)
    experts = _attributes(context, op).get("num_experts")
    if isinstance(experts, int) and experts < 1:
        raise InferenceError(f"{op.name}: attribute 'num_experts' must be at least 1, but is {experts}")
    rows = _dim(None if choices is None else _product([_size([dim], 0) for dim in choices]))
    shape = None if columns is None else [rows, columns[-1]]
    _set_output(context, 0, x.elem_type if x is not None else 0, shape)
    for index in (1, 2, 3):
        _set_output(context, index, TensorProto.INT32, [rows])
    _set_output(context, 4, TensorProto.INT64, [_dim(experts + 1 if isinstance(experts, int) else None)])


def _infer_finalize_routing(context: InferenceContext) -> None:
    """Sets the output: the leading dimensions of the weights, the columns and the type of the rows."""
    op = OPS["FinalizeRouting"]
    output = _input(context, 0)
    rows, weights = _dims(op, 0, output), _dims(op, 1, _input(context, 1))
    shape = None if rows is None or weights is None else [*weights[:-1], rows[-1]]
    _set_output(context, 0, output.elem_type if output is not None else 0, shape)


def _infer_gather_finalize(context: InferenceContext) -> None:
    """Checks the attributes and sets the output: the leading dimensions of the weights, the type of the rows."""
    op = OPS["GatherFinalize"]
    output = _input(context, 0)
    rows, weights = _dims(op, 0, output), _dims(op, 1, _input(context, 1))
    attributes = _attributes(context, op)
    for name, least in (("hidden_size", 1), ("local_begin", 0), ("local_count", 1)):
        value = attributes.get(name)
        if isinstance(value, int) and value < least:
            raise InferenceError(f"{op.name}: attribute '{name}' must be at least {least}, but is {value}")
    hidden, padded = attributes.get("hidden_size"), _size(rows, -1)
    if isinstance(hidden, int) and padded is not None and hidden > padded:
        raise InferenceError(
            f"{op.name}: attribute 'hidden_size' must be at most the last dimension of input 'expert_output', {padded},"
            f" but is {hidden}"
        )
    columns = _dim(hidden if isinstance(hidden, int) else None)
    shape = None if weights is None else [*weights[:-1], columns]
    _set_output(context, 0, output.elem_type if output is not None else 0, shape)


def _infer_fused_experts(context: InferenceContext) -> None:
    """Checks the attributes and the presence of the maps, and sets the output: the type and the shape of x."""
    op = OPS["FusedExperts"]
    attributes = _attributes(context, op)
    if _required(op) <= attributes.keys():
        try:
            ExpertsConfig.from_attributes(attributes)
        except ValueError as error:
            raise InferenceError(str(error)) from None
    maps = {tensor.name: context.has_input(i) for i, tensor in enumerate(op.inputs) if tensor in ROUTING_MAPS}
    _check_all_or_none(op, "input", maps)
    x = _input(context, 0)
    _set_output(context, 0, x.elem_type if x is not None else 0, _dims(op, 0, x))


def _infer_router_probs(context: InferenceContext) -> None:
    """Checks the attributes and sets the outputs: probs of the type and shape of the logits, map and indices."""
    op = OPS["RouterProbs"]
    logits = _input(context, 0)
    dims = _dims(op, 0, logits)
    experts = _size(dims, -1)
    for index in (1, 2):
        _check_vector(context, op, index, experts)
    attributes = _attributes(context, op)
    if _required(op) <= attributes.keys():
        try:
            has_bias = _input(context, 1) is not None
            check_router_probs(router_probs_config(attributes), experts, has_bias)
        except ValueError as error:
            raise InferenceError(str(error)) from None
    _set_training_outputs(context, op, logits, dims)
    chosen = attributes.get("k")
    indices = None if dims is None else [*dims[:-1], _dim(chosen if isinstance(chosen, int) else None)]
    _set_output(context, 2, TensorProto.INT32, indices)


def _infer_router_scores(context: InferenceContext) -> None:
    """Checks the attributes and sets the outputs: scores of the type and shape of the logits, and the map."""
    op = OPS["RouterScores"]
    logits = _input(context, 0)
    dims = _dims(op, 0, logits)
    attributes = _attributes(context, op)
    if _required(op) <= attributes.keys():
        try:
            RouterScoresConfig.from_attributes(attributes).check(_size(dims, -1))
        except ValueError as error:
            raise InferenceError(str(error)) from None
    _set_training_outputs(context, op, logits, dims)


def _infer_aux_loss(context: InferenceContext) -> None:
    """Checks the attributes and sets the output: a number."""
    op = OPS["AuxLoss"]
    experts = _size(_dims(op, 0, _input(context, 0)), -1)
    attributes = _attributes(context, op)
    if _required(op) <= attributes.keys():
        try:
            AuxLossConfig.from_attributes(attributes).check(experts)
        except ValueError as error:
            raise InferenceError(str(error)) from None
    _check_vector(context, op, 1, experts)
    _set_output(context, 0, TensorProto.FLOAT, [])


_INFERENCE: Mapping[str, Callable[[InferenceContext], None]] = {
    "FusedRouter": _infer_fused_router,
    "SharedGateRouter": _infer_shared_gate_router,
    "PermuteTokens": _infer_permute_tokens,
    "FinalizeRouting": _infer_finalize_routing,
    "GatherFinalize": _infer_gather_finalize,
    "FusedExperts": _infer_fused_experts,
    "RouterProbs": _infer_router_probs,
    "RouterScores": _infer_router_scores,
    "AuxLoss": _infer_aux_loss,
}

_Dims = Sequence[TensorShapeProto.Dimension]


def _set_router_outputs(
    context: InferenceContext, logits: _Dims | None, columns: int | None, experts: int | None
) -> None:
    """Sets weights, indices and maps: of so many columns and experts, as far as they are known."""
    maps = range(2, 2 + len(ROUTING_MAPS))
    shape = None if logits is None else [*logits[:-1], _dim(columns)]
    rows = _product([_size([dim], 0) for dim in shape]) if shape is not None else None
    _set_output(context, 0, TensorProto.FLOAT, shape)
    _set_output(context, 1, TensorProto.INT32, shape)
    for index in maps[:-1]:
        _set_output(context, index, TensorProto.INT32, [_dim(rows)])
    _set_output(context, maps[-1], TensorProto.INT64, [_dim(None if experts is None else experts + 1)])


def _differ(first: int | None, second: int | None) -> bool:
    return first is not None and second is not None and first != second


def _set_output(context: InferenceContext, index: int, element_type: int, dims: _Dims | None) -> None:
    """Sets type and shape of an output where the node has it; 0 and None: not known."""
    if not context.has_output(index):
        return
    output = TypeProto()
    output.tensor_type.elem_type = element_type
    if dims is not None:
        output.tensor_type.shape.dim.extend(dims)
    context.set_output_type(index, output)


def _set_training_outputs(
    context: InferenceContext, op: Op, logits: TypeProto.Tensor | None, dims: _Dims | None
) -> None:
    """Sets outputs of a router in training: dense values, and the map as bytes and, last, as bits."""
    bitmap = len(op.outputs) - 1
    if not (context.has_output(1) or context.has_output(bitmap)):
        raise InferenceError(f"{op.name}: output 'routing_map' or 'routing_bitmap' must be there, but neither is")
    experts = _size(dims, -1)
    _set_output(context, 0, logits.elem_type if logits is not None else 0, dims)
    _set_output(context, 1, TensorProto.BOOL, dims)
    bits = None if dims is None else [*dims[:-1], _dim(None if experts is None else -(-experts // 8))]
    _set_output(context, bitmap, TensorProto.UINT8, bits)


def _dims(op: Op, index: int, tensor: TypeProto.Tensor | None) -> _Dims | None:
    """The dimensions of an input that is no scalar; None where they are not known."""
    if tensor is None or not tensor.HasField("shape"):
        return None
    if not tensor.shape.dim:
        name = op.inputs[index].name
        raise InferenceError(f"{op.name}: input '{name}' must have rank 1 or more, but is a scalar")
    return list(tensor.shape.dim)


def _dim(size: int | None) -> TensorShapeProto.Dimension:
    return TensorShapeProto.Dimension() if size is None else TensorShapeProto.Dimension(dim_value=size)


def _size(dims: _Dims | None, axis: int) -> int | None:
    return dims[axis].dim_value if dims and dims[axis].HasField("dim_value") else None


def _product(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _check_all_or_none(op: Op, kind: str, present: Mapping[str, bool]) -> None:
    if any(present.values()) and not all(present.values()):
        missing = next(name for name, there in present.items() if not there)
        raise InferenceError(
            f"{op.name}: {kind} '{missing}' must be there, as the other routing maps are: all four or none"
        )


def _input(context: InferenceContext, index: int) -> TypeProto.Tensor | None:
    """The tensor type of an input; without fields where it is not known, None where the node leaves the input out."""
    if not context.has_input(index):
        return None
    input_type: Any = context.get_input_type(index)
    return TypeProto.Tensor() if input_type is None else input_type.tensor_type


def _required(op: Op) -> set[str]:
    return {attribute.name for attribute in op.attributes if attribute.only_with is None}


def _attributes(context: InferenceContext, op: Op) -> dict[str, AttributeValue]:
    """The values of a node's attributes."""
    values: dict[str, AttributeValue] = {}
    for attribute in op.attributes:
        proto: Any = context.get_attribute(attribute.name)
        if proto is not None:
            value = onnx.helper.get_attribute_value(proto)
            values[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return values


def _check_vector(context: InferenceContext, op: Op, index: int, experts: int | None) -> None:
    vector = _input(context, index)
    if vector is None or not vector.HasField("shape"):
        return
    dims = vector.shape.dim
    known = [d.dim_value if d.HasField("dim_value") else None for d in dims]
    if len(known) != 1 or (known[0] is not None and experts is not None and known[0] != experts):
        shape = ", ".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims)
        expected = "E" if experts is None else experts
        name = op.inputs[index].name
        raise InferenceError(f"{op.name}: input '{name}' must have shape [{expected}], but has [{shape}]")
