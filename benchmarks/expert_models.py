"""ONNX models of MoE layers that share one set of experts: as our ops, and as the contrib ops MoE and QMoE.

A stack's layers have logits and rows of their own, so that each can be sent anywhere. In a cycle each layer follows
from the one before, as in a decode step: `x = x + experts(x, x . gate)`. A model describes its tensors by name, so that
a session on any device can be bound to whatever holds the values. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx
from onnx import TensorProto, helper

from ort_moe.graphs.node_kinds import CONTRIB
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, FUSED_ROUTER, VERSION, AttributeValue
from ort_moe.ops.experts_config import ExpertsConfig

SWIGLU: dict[str, AttributeValue] = {"activation": "silu", "gated": 1, "gate_layout": "interleaved"}
ROUTER: dict[str, AttributeValue] = {"score": "softmax", "normalize": 1}

_QUANT_TYPES = {"nvfp4": "nvfp4", "mxfp4": "fp4", "int4": "int", "int8": "int"}
"""What QMoE calls the formats that it takes on CUDA, from ONNX Runtime 1.31 on; MoE takes dense weights."""

_SCALES = {"nvfp4": TensorProto.FLOAT8E4M3FN, "mxfp4": TensorProto.UINT8, "fp8": TensorProto.FLOAT}
"""Types of the scales that do not have the rows' type."""

Tensors = dict[str, tuple[int, tuple[Any, ...]]]
"""ONNX element type and shape by name."""


@dataclass(frozen=True)
class Shape:
    """A layer: E experts, K chosen, H hidden, I inner, the weights' format and the rows' type.

    Attributes:
        block_size: int4, int8, fp8: weights that share a scale.
    """

    experts: int
    k: int
    hidden: int
    inner: int
    weight_format: str
    dtype: str = "bfloat16"
    block_size: int = 0

    @property
    def name(self) -> str:
        weights = f"{self.weight_format}/{self.block_size}" if self.block_size else self.weight_format
        return f"{weights} {self.dtype} {self.experts}/{self.k}/{self.hidden}/{self.inner}"

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        """Of FusedExperts."""
        return {"weight_format": self.weight_format, "block_size": self.block_size, **SWIGLU}

    @property
    def is_float4(self) -> bool:
        """Whether weights are e2m1, which QMoE packs along N."""
        return self.weight_format in ("nvfp4", "mxfp4")

    @property
    def contrib(self) -> str | None:
        """The contrib op that takes the format on CUDA."""
        return "MoE" if self.weight_format == "dense" else "QMoE" if self.weight_format in _QUANT_TYPES else None

    @property
    def element_type(self) -> int:
        """ONNX's number of the rows' type."""
        return int(TensorProto.DataType.Value(self.dtype.upper()))

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights and scales."""
        return sum(_element_bytes(kind) * math.prod(dims[1:]) for kind, dims in self.weights().values())

    @property
    def flops_per_choice(self) -> int:
        """Products and sums of one token in one expert."""
        return 2 * 3 * self.hidden * self.inner

    @property
    def contrib_session_bytes(self) -> int:
        """Device memory that each node of a contrib session takes: QMoE keeps its own copy of all experts.

        It holds the weights once more, their scales once more, and these again in the rows' type.
        """
        if self.weight_format == "dense":
            return 0
        tensors = self.weights(packed_for="QMoE")
        scales = sum(math.prod(dims) for name, (_, dims) in tensors.items() if name.endswith("_scales"))
        return self.experts * self.expert_bytes + scales * _element_bytes(self.element_type)

    def layers(self) -> tuple[tuple[str, int, int], ...]:
        """Name, N and D of fc1 and fc2."""
        return ("fc1", 2 * self.inner, self.hidden), ("fc2", self.hidden, self.inner)

    def weights(self, *, packed_for: Literal["ours", "QMoE"] = "ours") -> Tensors:
        """The experts' tensors. QMoE declares e2m1 weights as (E, D, N / 2), and e8m0 scales by their own type."""
        block = ExpertsConfig.from_attributes(self.attributes).scale_block
        kinds = {"dense": self.element_type, "fp8": TensorProto.FLOAT8E4M3FN}
        tensors: Tensors = {}
        for name, n, d in self.layers():
            packed = (n, d // 2) if self.is_float4 or self.weight_format == "int4" else (n, d)
            if self.is_float4 and packed_for == "QMoE":
                packed = (d, n // 2)
            tensors[f"{name}_weights"] = kinds.get(self.weight_format, TensorProto.UINT8), (self.experts, *packed)
            if self.weight_format == "dense":
                continue
            rows = -(-n // block) if self.weight_format == "fp8" else n
            kind = _SCALES.get(self.weight_format, self.element_type)
            if self.weight_format == "mxfp4" and packed_for == "QMoE":
                kind = TensorProto.FLOAT8E8M0
            tensors[f"{name}_scales"] = kind, (self.experts, rows, -(-d // block))
            if self.is_float4:
                tensors[f"{name}_global_scale"] = TensorProto.FLOAT, (self.experts,)
        return tensors


def _element_bytes(kind: int) -> int:
    return helper.tensor_dtype_to_np_dtype(kind).itemsize


def pack_along_rows(weights: Any, out: Any) -> None:
    """Repacks four-bit weights from ours to QMoE's: two neighbours along N to a byte in place of two along D.

    Args:
        weights: uint8 (E, N, D / 2), an array of NumPy or torch.
        out: (E, D, N / 2), written.
    """
    low, high = weights & 15, weights >> 4
    out[:, 0::2] = (low[:, 0::2] | low[:, 1::2] << 4).swapaxes(1, 2)
    out[:, 1::2] = (high[:, 0::2] | high[:, 1::2] << 4).swapaxes(1, 2)


@dataclass(frozen=True)
class Model:
    """A model and the tensors that a session of it must be given and gives."""

    proto: onnx.ModelProto
    inputs: Tensors
    outputs: Tensors
    constants: Tensors
    """Initializers whose data the session's options hold."""

    def add_constants(self, options: Any, values: Mapping[str, Any]) -> None:
        """Hands the constants to a session's options, as NumPy arrays of their bits; nodes share them."""
        import onnxruntime

        held = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(values[name], kind)
            for name, (kind, _) in self.constants.items()
        }
        options.add_external_initializers(list(held), list(held.values()))


def stack_model(
    shape: Shape, tokens: int | str, layers: int, *, contrib: bool, weights_prepacked: bool = False
) -> Model:
    """`layers` independent layers: logits{n} (T, E) and x{n} (T, H) to y{n} (T, H).

    Args:
        shape: Of every layer.
        tokens: T; a name leaves it open.
        layers: Their number.
        contrib: Make them QMoE or MoE in place of FusedRouter and FusedExperts.
        weights_prepacked: QMoE of nvfp4: its weights have our bytes, which ONNX Runtime knows from 1.32 on.
    """
    inputs: Tensors = {}
    outputs: Tensors = {}
    nodes: list[onnx.NodeProto] = []
    for n in range(layers):
        inputs[f"logits{n}"] = shape.element_type, (tokens, shape.experts)
        inputs[f"x{n}"] = outputs[f"y{n}"] = shape.element_type, (tokens, shape.hidden)
        if contrib:
            nodes.append(_contrib_node(shape, f"x{n}", f"logits{n}", f"y{n}", weights_prepacked))
        else:
            nodes += _our_nodes(shape, f"x{n}", f"logits{n}", f"y{n}")
    return _model(shape, nodes, inputs, outputs, contrib=contrib)


def cycle_model(shape: Shape, tokens: int, layers: int, *, contrib: bool, weights_prepacked: bool = False) -> Model:
    """`layers` layers one after another with their router's product: x and gate{n} (H, E) to y, both (T, H).

    The sum with x is FusedExperts' residual; the contrib ops have none, so an Add follows them.
    """
    row: tuple[int, tuple[int, ...]] = shape.element_type, (tokens, shape.hidden)
    inputs: Tensors = {"x": row}
    nodes = []
    x = "x"
    for n in range(layers):
        inputs[f"gate{n}"] = shape.element_type, (shape.hidden, shape.experts)
        y = "y" if n == layers - 1 else f"x{n + 1}"
        nodes.append(helper.make_node("MatMul", [x, f"gate{n}"], [f"logits{n}"]))
        if contrib:
            nodes.append(_contrib_node(shape, x, f"logits{n}", f"experts{n}", weights_prepacked))
            nodes.append(helper.make_node("Add", [x, f"experts{n}"], [y]))
        else:
            nodes += _our_nodes(shape, x, f"logits{n}", y, residual=x)
        x = y
    return _model(shape, nodes, inputs, {"y": row}, contrib=contrib)


def _our_nodes(shape: Shape, x: str, logits: str, y: str, *, residual: str = "") -> list[onnx.NodeProto]:
    mix, indices = f"{y}_weights", f"{y}_indices"
    router: dict[str, Any] = FUSED_ROUTER.complete({"k": shape.k, **ROUTER})
    given = {"x": x, "weights": mix, "indices": indices, "residual": residual}
    given |= {name: name for name in shape.weights()}
    inputs = [given.get(tensor.name, "") for tensor in FUSED_EXPERTS.inputs]
    while not inputs[-1]:
        inputs.pop()
    experts: dict[str, Any] = FUSED_EXPERTS.complete(shape.attributes)
    return [
        helper.make_node("FusedRouter", [logits], [mix, indices], domain=DOMAIN, **router),
        helper.make_node("FusedExperts", inputs, [y], domain=DOMAIN, **experts),
    ]


def _contrib_node(shape: Shape, x: str, logits: str, y: str, weights_prepacked: bool) -> onnx.NodeProto:
    attributes: dict[str, Any] = {
        "k": shape.k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "normalize_routing_weights": 1,
    }
    if shape.weight_format == "dense":
        return helper.make_node("MoE", [x, logits, "fc1_weights", "", "fc2_weights"], [y], domain=CONTRIB, **attributes)
    inputs = [x, logits, "fc1_weights", "fc1_scales", "", "fc2_weights", "fc2_scales"]
    attributes |= {
        "quant_type": _QUANT_TYPES[shape.weight_format],
        "expert_weight_bits": 8 if shape.weight_format == "int8" else 4,
        "block_size": ExpertsConfig.from_attributes(shape.attributes).scale_block,
    }
    if shape.is_float4:
        inputs += [*[""] * 8, "fc1_global_scale", "fc2_global_scale"]
        if weights_prepacked:
            attributes["weights_prepacked"] = 1
    else:
        attributes["weights_prepacked"] = 0  # our bytes, which it repacks
    return helper.make_node("QMoE", inputs, [y], domain=CONTRIB, **attributes)


def _model(shape: Shape, nodes: Sequence[onnx.NodeProto], inputs: Tensors, outputs: Tensors, *, contrib: bool) -> Model:
    """Weights are inputs, bound where they lie, but those of QMoE, which repacks initializers alone."""
    constants: Tensors = {}
    if contrib and shape.weight_format != "dense":
        constants = shape.weights(packed_for="QMoE")
    else:
        inputs = inputs | shape.weights()
    initializers = []
    for name, (kind, dims) in constants.items():
        proto = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        proto.external_data.add(key="location", value="held by the session options")
        initializers.append(proto)
    graph = helper.make_graph(nodes, "layers", _declared(inputs), _declared(outputs), initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION), helper.make_opsetid(CONTRIB, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Model(proto, inputs, outputs, constants)


def _declared(tensors: Tensors) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in tensors.items()]


def global_scale(depth: int) -> float:
    """A power of two that keeps sums over `depth` products of random e2m1 codes near one.

    Its products with e4m3 scales have four significant bits: QMoE rounds them to the rows' type, here without loss.
    """
    return float(2.0 ** round(math.log2(0.5 / math.sqrt(depth))))
