"""Models of contrib nodes one after another, and models with one constant that is wrong: what checks are shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ort_moe.files.loading import load_model
from tests.contrib_models import EXPERTS, HIDDEN, ContribCase


def layers(case: ContribCase, count: int = 2) -> onnx.ModelProto:
    """`x = x + MoE(x, x @ gate)`, layer after layer, all of the same weights."""
    proto = case.model()
    graph, (moe,) = proto.graph, proto.graph.node
    rng, dtype = np.random.default_rng(1), case.numpy_type
    nodes, x = [], "x"
    for n in range(count):
        graph.initializer.append(numpy_helper.from_array(rng.normal(size=(HIDDEN, EXPERTS)).astype(dtype), f"gate{n}"))
        node = onnx.NodeProto()
        node.CopyFrom(moe)
        node.name, node.output[0] = f"moe{n}", f"experts{n}"
        node.input[0], node.input[1] = x, f"logits{n}"
        nodes.append(helper.make_node("MatMul", [x, f"gate{n}"], [f"made{n}"]))
        nodes.append(helper.make_node("Reshape", [f"made{n}", "rows_of_logits"], [f"logits{n}"]))
        nodes += [node, helper.make_node("Add", [x, f"experts{n}"], [x := f"x{n}"])]
    nodes[-1].output[0] = "y"
    graph.initializer.append(numpy_helper.from_array(np.array([-1, EXPERTS], np.int64), "rows_of_logits"))
    del graph.node[:], graph.input[1:]
    graph.node.extend(nodes)
    return proto


def tied_layer() -> onnx.ModelProto:
    """One layer whose router gives every expert the same logit."""
    proto = layers(ContribCase(), 1)
    (gate,) = [tensor for tensor in proto.graph.initializer if tensor.name == "gate0"]
    gate.CopyFrom(numpy_helper.from_array(np.zeros((HIDDEN, EXPERTS), np.float32), gate.name))
    return proto


def saved(proto: onnx.ModelProto, path: Path) -> Path:
    onnx.save(proto, path)
    return path


def damaged(path: Path, ending: str, factor: float) -> Path:
    """The model with all of one constant multiplied."""
    model = load_model(path)
    (name,) = [name for name in model.graph.initializers if name.endswith(ending)]
    value = model.graph.initializers[name]
    assert value.const_value is not None
    array = value.const_value.numpy()
    value.const_value = ir.tensor((array.astype(np.float32) * factor).astype(array.dtype), name=name)
    ir.save(model, path.with_name("damaged.onnx"))
    return path.with_name("damaged.onnx")
