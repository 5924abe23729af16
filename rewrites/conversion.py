"""Pack the dense weights of FusedExperts: FusedExperts(x, dense) -> FusedExperts(x, codes, scales).

A layer at a time, of it an expert at a time, from where the weights lie to a file; nothing else of the model changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ort_moe.choices import BLOCK_SIZES
from ort_moe.files.streamed_tensor import Array, entry_of, let_go
from ort_moe.files.weights_file import WeightsFile
from ort_moe.graphs.node_kinds import experts_inputs, is_experts
from ort_moe.ops import CONVERTED_FROM, FUSED_EXPERTS
from ort_moe.packing.pieces import Packing, PackingError, pack_expert
from ort_moe.rewrites.canonicalize import put_in_order
from ort_moe.rewrites.experts.sites import ExpertsSite
from ort_moe.rewrites.functions import attach_functions, drop_unread_functions
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.values import FLOATS, dim


@dataclass(frozen=True)
class LayerConversion:
    """What became of the weights of one of the two layers of a FusedExperts.

    Attributes:
        layer: `fc1` or `fc2`.
        weights: Name of what held them.
        shape: (E, N, D).
        bytes_before: Bytes as they were.
        bytes_after: Bytes of codes, scales and zero points.
        largest_error: Largest difference of a weight from what it now stands for.
        largest_weight: Largest magnitude of a weight.
        relative_error: Norm of the differences, relative to that of the weights.
    """

    layer: str
    weights: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    largest_error: float
    largest_weight: float
    relative_error: float


@dataclass(frozen=True)
class Conversion:
    """What became of the weights of a FusedExperts.

    Attributes:
        node: Its name.
        packing: How they are packed, in words.
        layers: fc1 and fc2; empty where they are left.
        why_left: Why they are left as they are; empty where they were packed.
    """

    node: str
    packing: str
    layers: tuple[LayerConversion, ...] = ()
    why_left: str = ""


@dataclass(frozen=True)
class _Packed:
    parts: dict[str, ir.Value]
    told: LayerConversion


def convert_experts(model: ir.Model, packing: Packing, file: WeightsFile) -> tuple[Conversion, ...]:
    """Pack the weights of every FusedExperts of the model, in place.

    Args:
        model: After `rewrite`.
        packing: How.
        file: Takes what is packed; the model refers to it.

    Raises:
        OSError: The file cannot be written.
    """
    names = Names(model.graph)
    done: dict[tuple[ir.Value, str], _Packed] = {}
    nodes = [node for node in model.graph.all_nodes() if is_experts(node)]
    conversions = tuple(_convert(node, model.graph, packing, file, names, done) for node in nodes)
    if any(conversion.layers for conversion in conversions):
        put_in_order(model)
        attach_functions(model)
        drop_unread_functions(model)
    return conversions


def _convert(
    node: ir.Node,
    graph: ir.Graph,
    packing: Packing,
    file: WeightsFile,
    names: Names,
    done: dict[tuple[ir.Value, str], _Packed],
) -> Conversion:
    given = experts_inputs(node)
    why = _obstacle(node, packing)
    if why is None:
        dtype = given["x"].dtype
        assert dtype is not None
        packed = {}
        for layer in ("fc1", "fc2"):
            value = given[f"{layer}_weights"]
            try:
                if (value, layer) not in done:
                    done[value, layer] = _pack(value, layer, dtype, packing, file, names)
            except ValueError as error:
                why = str(error)
                break
            packed[layer] = done[value, layer]
    if why is not None:
        return Conversion(node.name or "", str(packing), why_left=why)
    old = given["fc1_weights"].dtype
    node.metadata_props[CONVERTED_FROM] = "" if old is None else old.name.lower()
    node.resize_inputs(len(FUSED_EXPERTS.inputs))
    for layer, each in packed.items():
        for part, value in each.parts.items():
            if value.name not in graph.initializers:
                graph.register_initializer(value)
            node.replace_input_with(FUSED_EXPERTS.input_index(f"{layer}_{part}"), value)
    last = max(place for place, value in enumerate(node.inputs) if value is not None)
    node.resize_inputs(last + 1)
    node.overload = ""  # whose function is of dense weights
    for name, attribute in packing.attributes.items():
        node.attributes.add(ir.convenience.convert_attribute(name, attribute))
    return Conversion(node.name or "", str(packing), tuple(each.told for each in packed.values()))


def _obstacle(node: ir.Node, packing: Packing) -> str | None:
    """Why the weights of a FusedExperts cannot be packed, in a clause."""
    weight_format = node.attributes["weight_format"].as_string()
    if weight_format != "dense":
        return f"they are packed already, in {weight_format}"
    given = experts_inputs(node)
    x = given.get("x")
    if x is None or x.dtype is None:
        return "the type of the rows is not known"
    for layer in ("fc1", "fc2"):
        value = given.get(f"{layer}_weights")
        if value is None or value.const_value is None or value.is_graph_input():
            return f"'{layer}_weights' are no constant"
        if value.const_value.dtype not in FLOATS:
            return f"'{layer}_weights' are {value.const_value.dtype}"
        depth = dim(value, 2)
        if depth is None or depth % packing.depth_multiple:
            size = "hidden size" if layer == "fc1" else "inner size"
            told = f"the {size} must be a multiple of {packing.depth_multiple}, but is {depth}"
            return told + _way_out(packing, [dim(given[f"{each}_weights"], 2) for each in ("fc1", "fc2")])
    return None


def _way_out(packing: Packing, depths: Sequence[int | None]) -> str:
    """What weights of these depths can be packed to instead, as the end of a sentence."""
    if packing.weight_format in ("int4", "int8"):
        fitting = [size for size in BLOCK_SIZES if all(depth and depth % size == 0 for depth in depths)]
        if fitting:
            return f"; blocks of {max(fitting)} fit"
    return "; fp8 takes any size"


def _pack(
    value: ir.Value, layer: str, dtype: ir.DataType, packing: Packing, file: WeightsFile, names: Names
) -> _Packed:
    """Pack one layer of all experts.

    Raises:
        ValueError: The weights are not finite, or their scales do not fit into the type of x.
    """
    tensor = value.const_value
    assert tensor is not None
    experts, rows, depth = (int(size) for size in tensor.shape.numpy())
    places = {
        part: file.set_aside(kind, shape, names.unused(f"{value.name}_{packing.weight_format}_{part}"))
        for part, (kind, shape) in packing.parts(experts, rows, depth, dtype.numpy()).items()
    }
    total = PackingError()
    for expert in range(experts):

        def write(part: str, first: int, entries: Array, expert: int = expert) -> None:
            each = places[part].shape.numpy()[1] if len(places[part].shape) > 1 else 1
            file.write(places[part], expert * each + first, entries)

        matrix = np.asarray(entry_of(tensor, expert))
        total += pack_expert(packing, matrix, dtype.numpy(), value.name or layer, expert, write)
    let_go(tensor)
    parts = {
        part: ir.Value(
            name=place.name, const_value=place, type=ir.TensorType(place.dtype), shape=ir.Shape(place.shape.numpy())
        )
        for part, place in places.items()
    }
    after = sum(place.nbytes for place in places.values())
    told = LayerConversion(
        layer,
        value.name or "",
        (experts, rows, depth),
        tensor.nbytes,
        after,
        total.largest,
        total.of,
        total.relative,
    )
    return _Packed(parts, told)


def told_as_packed(
    sites: tuple[ExpertsSite, ...], model: ir.Model, conversions: tuple[Conversion, ...]
) -> tuple[ExpertsSite, ...]:
    """The experts' sites with the attributes that their nodes have now."""
    packed = {conversion.node for conversion in conversions if conversion.layers}
    now = {
        node.name: {name: attribute.value for name, attribute in node.attributes.items()}
        for node in model.graph.all_nodes()
        if is_experts(node) and node.name in packed
    }
    return tuple(replace(site, attributes=now[site.node]) if site.node in now else site for site in sites)
