"""ONNX schemas of the ops, from the op table: checking and shape inference of models that contain them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TensorProto, TypeProto, defs
from onnx.shape_inference import InferenceContext, InferenceError

from ort_moe.ops import DOMAIN, OPS, VERSION, AttributeValue, Op, Tensor
from ort_moe.router_config import RouterConfig

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
            defs.register_schema(_schema(op))


def _schema(op: Op) -> defs.OpSchema:
    constraints = []

    def parameter(tensor: Tensor) -> defs.OpSchema.FormalParameter:
        types = [f"tensor({name})" for name in tensor.types]
        type_name = types[0]
        if len(types) > 1:
            type_name = f"T_{tensor.name}"
            constraints.append((type_name, types, f"Types of {tensor.name}."))
        option = _OPTION.Optional if tensor.optional else _OPTION.Single
        return defs.OpSchema.FormalParameter(tensor.name, type_name, tensor.doc, param_option=option)

    schema = defs.OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        op.doc,
        inputs=[parameter(tensor) for tensor in op.inputs],
        outputs=[parameter(tensor) for tensor in op.outputs],
        type_constraints=constraints,
        attributes=[
            defs.OpSchema.Attribute(a.name, _ATTRIBUTE_TYPES[a.kind], a.doc, required=a.only_with is None)
            for a in op.attributes
        ],
    )
    schema.set_type_and_shape_inference_function(_INFERENCE[op.name])
    return schema


def _infer_fused_router(context: InferenceContext) -> None:
    """Checks the attributes and sets the outputs' types and shapes; unknown input types and shapes are left open."""
    logits = _input(context, 0)
    dims = list(logits.shape.dim) if logits is not None and logits.HasField("shape") else None
    if dims is not None and not dims:
        raise InferenceError("FusedRouter: input 'logits' must have rank 1 or more, but is a scalar")
    experts = dims[-1].dim_value if dims and dims[-1].HasField("dim_value") else None
    for index, name in ((1, "selection_bias"), (2, "expert_scale")):
        _check_vector(context, index, name, experts)
    attributes = _attributes(context, "FusedRouter")
    chosen = attributes.get("k")
    if _required("FusedRouter") <= attributes.keys():  # a missing one is the checker's to report
        try:
            config = RouterConfig.from_attributes(attributes)
            config.check(experts, has_selection_bias=_input(context, 1) is not None)
        except ValueError as error:
            raise InferenceError(str(error)) from None

    for index, element_type in enumerate((TensorProto.FLOAT, TensorProto.INT32)):
        output = TypeProto()
        output.tensor_type.elem_type = element_type
        if dims is not None:
            output.tensor_type.shape.dim.extend(dims[:-1])
            last = output.tensor_type.shape.dim.add()
            if isinstance(chosen, int):
                last.dim_value = chosen
        if context.has_output(index):
            context.set_output_type(index, output)


_INFERENCE: Mapping[str, Callable[[InferenceContext], None]] = {"FusedRouter": _infer_fused_router}


def _input(context: InferenceContext, index: int) -> TypeProto.Tensor | None:
    """The tensor type of an input; without fields where it is not known, None where the node leaves the input out."""
    if not context.has_input(index):
        return None
    input_type: Any = context.get_input_type(index)
    return TypeProto.Tensor() if input_type is None else input_type.tensor_type


def _required(op_name: str) -> set[str]:
    return {attribute.name for attribute in OPS[op_name].attributes if attribute.only_with is None}


def _attributes(context: InferenceContext, op_name: str) -> dict[str, AttributeValue]:
    """The values of a node's attributes."""
    values: dict[str, AttributeValue] = {}
    for attribute in OPS[op_name].attributes:
        proto: Any = context.get_attribute(attribute.name)
        if proto is not None:
            value = onnx.helper.get_attribute_value(proto)
            values[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return values


def _check_vector(context: InferenceContext, index: int, name: str, experts: int | None) -> None:
    vector = _input(context, index)
    if vector is None or not vector.HasField("shape"):
        return
    dims = vector.shape.dim
    known = [d.dim_value if d.HasField("dim_value") else None for d in dims]
    if len(known) != 1 or (known[0] is not None and experts is not None and known[0] != experts):
        shape = ", ".join(str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims)
        expected = "E" if experts is None else experts
        raise InferenceError(f"FusedRouter: input '{name}' must have shape [{expected}], but has [{shape}]")
