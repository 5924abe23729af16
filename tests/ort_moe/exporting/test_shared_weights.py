"""Weights that several graphs hold lie in their file once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from ort_moe.exporting.shared_weights import move_weights
from ort_moe.files.loading import load_model


def model(**weights: np.ndarray) -> ir.Model:
    """One that returns its weights."""
    values = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in weights.items()]
    nodes = [ir.node("Identity", [value]) for value in values]
    outputs = [node.outputs[0] for node in nodes]
    for i, output in enumerate(outputs):
        output.name, output.dtype = f"out{i}", values[i].const_value.dtype  # type: ignore[union-attr]
    graph = ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 20}, name="graph")
    return ir.Model(graph, ir_version=10)


def test_shared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    common, other = (rng.normal(size=(32, 64)).astype(np.float32) for _ in range(2))
    small = np.arange(4, dtype=np.int64)
    first, second = model(a=common, n=small), model(b=common, c=other, d=common.reshape(64, 32))
    move_weights([first, second], tmp_path / "weights.data")
    for name, each in (("first", first), ("second", second)):
        ir.save(each, tmp_path / f"{name}.onnx")
    assert (tmp_path / "weights.data").stat().st_size == 3 * common.nbytes
    loaded = load_model(tmp_path / "second.onnx").graph.initializers
    for name, expected in (("b", common), ("c", other), ("d", common.reshape(64, 32))):
        np.testing.assert_array_equal(loaded[name].const_value.numpy(), expected)  # type: ignore[union-attr]
    inline = load_model(tmp_path / "first.onnx").graph.initializers["n"].const_value
    assert not isinstance(inline, ir.ExternalTensor)
