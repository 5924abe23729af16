"""A model file of MoE blocks one after another, each as exporters write it: a committed export with larger weights.

`x = x + block(x)`, with the router's product in the block and no attention between. The experts are in the form
`batched_mm`, which all exporters take. Every layer has a router of its own, and experts at an address of its own, of
the same random values. Needs no torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import models.fixtures
from benchmarks.expert_models import Shape
from benchmarks.exported_layer import enlarged_sizes

FIXTURES = {"float": "qwen3_moe_block_dynamo_fp32", "float16": "qwen3_moe_block_dynamo_fp16"}
"""By the rows' type."""

_TYPES = {"float": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_ALIGNMENT = 4096  # of each tensor in the file, so that it can be mapped


def write_exported_stack(shape: Shape, layers: int, path: Path) -> None:
    """Writes the model, and its weights in a file beside it.

    It takes hidden_states (batch, sequence, H) and returns as many rows.

    Raises:
        ValueError: The weights are not dense, or there is no export in the rows' type.
    """
    if shape.weight_format != "dense" or shape.dtype not in FIXTURES:
        known = " or ".join(FIXTURES)
        raise ValueError(f"exports are dense, in {known}, but {shape.name} was asked for")
    fixture = models.fixtures.get(FIXTURES[shape.dtype])
    exported = onnx.load(fixture.path)
    graph, (x,), (y,) = exported.graph, exported.graph.input, exported.graph.output
    small = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    gather_1, gather_2 = (node for node in graph.node if node.op_type == "GatherND")
    (product,) = (node for node in graph.node if node.op_type == "Gemm")
    gate, fc1, fc2 = product.input[1], gather_1.input[0], gather_2.input[0]
    sizes = enlarged_sizes(small, {small[fc2].shape[1]: shape.hidden, fixture.k: shape.k})

    rng = np.random.default_rng(0)
    weights = {
        name: _random(rng, dims, dims[-1], _TYPES[shape.dtype])
        for name, dims in (
            (fc1, (shape.experts, 2 * shape.inner, shape.hidden)),
            (fc2, (shape.experts, shape.hidden, shape.inner)),
        )
    }
    nodes, constants = [], []
    location = f"{path.name}.data"
    with path.with_name(location).open("wb") as file:
        for n in range(layers):
            row, out = f"rows.{n}", f"rows.{n + 1}"
            # What a block computes goes by the layer's name; what it takes is the sum of the layer before.
            inner = {x.name: row if n else x.name, y.name: f"block.{n}"}
            for node in graph.node:
                copy = onnx.NodeProto.FromString(node.SerializeToString())
                copy.name = f"layers.{n}.{node.name or node.output[0]}"
                for names in (copy.input, copy.output):
                    names[:] = [inner.get(name, f"layers.{n}.{name}") if name else "" for name in names]
                nodes.append(copy)
            ends = (row if n else x.name, f"block.{n}"), (y.name if n == layers - 1 else out)
            nodes.append(helper.make_node("Add", list(ends[0]), [ends[1]], name=f"layers.{n}.residual"))
            weights[gate] = _random(rng, (shape.experts, shape.hidden), shape.hidden, _TYPES[shape.dtype])
            for name, values in weights.items():
                constants.append(_write(file, location, f"layers.{n}.{name}", values, shape.element_type))
            for size in sizes:
                constants.append(onnx.TensorProto.FromString(size.SerializeToString()))
                constants[-1].name = f"layers.{n}.{size.name}"
    dims = ("batch", "sequence", shape.hidden)
    declared = [helper.make_tensor_value_info(value.name, shape.element_type, dims) for value in (x, y)]
    stack = helper.make_graph(nodes, "layers", declared[:1], declared[1:], constants)
    model = helper.make_model(stack, opset_imports=exported.opset_import, ir_version=exported.ir_version)
    onnx.save(model, path)


def _random(rng: np.random.Generator, dims: tuple[int, ...], depth: int, dtype: np.dtype) -> np.ndarray:  # type: ignore[type-arg]
    """Weights whose products with rows of unit variance have it, too; made by the first axis, to spare memory."""
    values = np.empty(dims, dtype)
    for each in values:
        each[...] = rng.standard_normal(dims[1:], np.float32) * np.float32(1 / math.sqrt(depth))
    return values


def _write(file: BinaryIO, location: str, name: str, values: np.ndarray, kind: int) -> TensorProto:  # type: ignore[type-arg]
    """Appends a tensor to the file; returns what refers to it."""
    file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
    proto = TensorProto(name=name, data_type=kind, dims=values.shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", file.tell()), ("length", values.nbytes)):
        proto.external_data.add(key=key, value=str(value))
    values.view(np.uint8).reshape(-1).tofile(file)
    return proto
