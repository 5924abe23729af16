"""A layer as exporters write it, of any size: a committed export with larger weights. Needs no torch.

`batched_mm` experts, the form that all exporters take: the chosen experts' weights are gathered once for each choice,
and a batched MatMul multiplies each copy with one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

import models.fixtures
from benchmarks.expert_models import Model, Shape, Tensors

FIXTURE = "mixtral_block_dynamo_fp32"
"""Softmax, top-k, renormalise; gate and value rows one after the other."""


def exported_model(shape: Shape) -> Model:
    """The layer behind its router's product: logits0 (T, E), x0 (1, T, H) and the weights to y0 (1, T, H).

    The weights are `fc1` (E, 2 I, H), all gates first, and `fc2` (E, H, I).

    Raises:
        ValueError: The weights are not dense float32, or the export is not of the form that this enlarges.
    """
    if (shape.weight_format, shape.dtype) != ("dense", "float"):
        raise ValueError(f"the exported layer has dense float weights, but {shape.name} was asked for")
    fixture = models.fixtures.get(FIXTURE)
    proto = onnx.load(fixture.path)
    graph = proto.graph
    (router,) = [node for node in graph.node if node.op_type == "Gemm"]
    gathers = [node for node in graph.node if node.op_type == "GatherND"]
    (x,), (y,) = graph.input, graph.output
    if len(gathers) != 2:
        raise ValueError(f"{FIXTURE} must gather the weights of two layers, but has {len(gathers)} GatherND nodes")
    renamed = {x.name: "x0", y.name: "y0", router.output[0]: "logits0"}
    renamed |= {gather.input[0]: name for gather, name in zip(gathers, ("fc1", "fc2"), strict=True)}

    small = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    hidden, k = small[gathers[1].input[0]].shape[1], fixture.k
    constants = enlarged_sizes(small, {hidden: shape.hidden, k: shape.k})
    nodes = [node for node in graph.node if node is not router]
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    inputs: Tensors = {
        "logits0": (TensorProto.FLOAT, ("T", shape.experts)),
        "x0": (TensorProto.FLOAT, (1, "T", shape.hidden)),
        "fc1": (TensorProto.FLOAT, (shape.experts, 2 * shape.inner, shape.hidden)),
        "fc2": (TensorProto.FLOAT, (shape.experts, shape.hidden, shape.inner)),
    }
    outputs: Tensors = {"y0": (TensorProto.FLOAT, (1, "T", shape.hidden))}
    declared, given = (
        [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in tensors.items()]
        for tensors in (inputs, outputs)
    )
    layer = helper.make_graph(nodes, "layer", declared, given, constants)
    model = helper.make_model(layer, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    return Model(model, inputs, outputs, {})


def enlarged_sizes(small: Mapping[str, npt.NDArray[Any]], enlarged: Mapping[int, int]) -> list[onnx.TensorProto]:
    """An export's constants that are sizes, as in reshapes and in TopK: of a larger layer.

    Args:
        small: All constants by name.
        enlarged: The larger size by the small one; others stay.
    """
    return [
        numpy_helper.from_array(np.array([enlarged.get(size, size) for size in value.tolist()], np.int64), name)
        for name, value in small.items()
        if value.dtype == np.int64
    ]


def copied_bytes(shape: Shape, tokens: int) -> int:
    """Memory that the copies of the chosen experts' weights take."""
    return tokens * shape.k * shape.expert_bytes
