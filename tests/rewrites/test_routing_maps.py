"""A FusedRouter whose routing maps are read keeps its place: no rule and no function makes the maps."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_moe.ops import ROUTING_MAPS
from ort_moe.rewrites import rewrite
from tests.router_models import router_model

MAPS = [tensor.name for tensor in ROUTING_MAPS]


def scaled_router(reader: str) -> ir.Model:
    """weights(FusedRouter(logits)) * 2, with maps that an output of the model, a node or nobody reads."""
    proto = router_model({"k": 2, "score": "softmax"}, logits_shape=["T", 8])
    graph = proto.graph
    graph.node[0].output.extend(MAPS)
    graph.node.append(helper.make_node("Mul", ["weights", "two"], ["scaled"], name="scale"))
    graph.initializer.append(numpy_helper.from_array(np.array(2.0, np.float32), "two"))
    graph.output[0].name = "scaled"
    offsets = onnx.ValueInfoProto()
    offsets.CopyFrom(helper.make_tensor_value_info(MAPS[-1], TensorProto.INT64, [9]))
    if reader == "node":
        graph.node.append(helper.make_node("Neg", [MAPS[-1]], ["read"], name="reader"))
        offsets.name = "read"
    if reader != "nobody":
        graph.output.append(offsets)
    return ir.from_proto(proto)


@pytest.mark.parametrize("reader", ["output", "node"])
def test_router_with_maps_stays(reader: str) -> None:
    model = scaled_router(reader)
    result = rewrite(model)
    assert not result.modified
    assert [node.op_type for node in model.graph][:2] == ["FusedRouter", "Mul"]
    assert [value.name for value in next(iter(model.graph)).outputs] == ["weights", "indices", *MAPS]
    assert not model.functions
    (site,) = result.sites
    assert site.status == "partly"
    assert "the routing maps of the FusedRouter are read" in site.findings[0].detail


def test_maps_that_nobody_reads_go() -> None:
    model = scaled_router("nobody")
    (site,) = rewrite(model).sites
    assert (site.status, site.absorbed) == ("whole", ("scale",))
    assert [node.op_type for node in model.graph] == ["FusedRouter"]
    assert len(model.functions) == 1
