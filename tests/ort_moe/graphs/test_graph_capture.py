"""What is said to be in the way of a CUDA graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper, numpy_helper, parser

import models.fixtures
from ort_moe.files.loading import load_model
from ort_moe.graphs.graph_capture import CaptureBlocker, capture_blockers, in_words, off_device, refusal, summary


def _blockers(*nodes: NodeProto) -> list[tuple[str, str]]:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("zero", 0), ("one", 1))],
    )
    model = ir.from_proto(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]))
    return [(blocker.node, blocker.why) for blocker in capture_blockers(model.graph)]


def test_shapes_are_no_data() -> None:
    assert not _blockers(
        helper.make_node("Shape", ["x"], ["shape"], "shape"),
        helper.make_node("Gather", ["shape", "zero"], ["n"], "size"),
        helper.make_node("Range", ["zero", "n", "one"], ["range"], "range"),
        helper.make_node("Expand", ["x", "shape"], ["y"], "expand"),
    )


def test_sizes_from_data() -> None:
    why = "the size of its output depends on data"
    assert _blockers(
        helper.make_node("ReduceMax", ["ids"], ["most"], "most", keepdims=0),
        helper.make_node("Add", ["most", "one"], ["end"], "end"),
        helper.make_node("Range", ["zero", "end", "one"], ["range"], "range"),
        helper.make_node("NonZero", ["ids"], ["where"], "where"),
        helper.make_node("Split", ["x", "ids"], ["y"], "split", axis=0),
    ) == [("range", why), ("where", why), ("split", why)]


def test_control_flow_and_its_inside() -> None:
    inside = helper.make_graph(
        [helper.make_node("NonZero", ["x"], ["z"], "inner")],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.INT64, None)],
    )
    nodes = [
        helper.make_node("Cast", ["one"], ["condition"], "cast", to=TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["y"], "if", then_branch=inside, else_branch=inside),
        helper.make_node("Det", ["x"], ["d"], "det"),
    ]
    found = _blockers(*nodes)
    assert ("if", "control flow") in found
    assert ("inner", "the size of its output depends on data") in found
    assert ("det", "no CUDA kernel") in found


def test_batched_exports_can_be_captured() -> None:
    for fixture in models.fixtures.all():
        if fixture.kind == "block" and fixture.exporter == "dynamo":
            assert not list(capture_blockers(load_model(fixture.path).graph)), fixture.name


def test_nodes_on_the_cpu() -> None:
    """Those that compute sizes may be there; what takes data may not, and what nobody knows is told."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (float[n, 4] x) => (float[4, n] y, float[n, 4] z) <int64[2] order = {1, 0}>
        { s = Shape (x) t = Gather (s, order) y = Reshape (x, t) z = Neg (x) }
    """)
    for node in model.graph.node:
        node.name = node.output[0]
    on_cpu = [("s", "Shape"), ("t", "Gather"), ("z", "Neg"), ("fused", "FusedConv")]
    found = list(off_device(ir.from_proto(model).graph, on_cpu))
    assert [(b.node, b.operator, b.why) for b in found] == [
        ("z", "Neg", "it runs on the CPU"),
        ("fused", "FusedConv", "it runs on the CPU"),
    ]


def test_summary() -> None:
    blockers = [CaptureBlocker(name, "If", "control flow") for name in "abcdef"]
    blockers.append(CaptureBlocker("", "Det", "no CUDA kernel"))
    assert summary(blockers) == ["If (control flow): a, b, c, d and 2 more", "Det (no CUDA kernel): (no name)"]
    in_the_way = "If (control flow): a, b, c, d and 2 more; Det (no CUDA kernel): (no name)"
    assert in_words(blockers) == in_the_way
    assert refusal("it", blockers) == f"it cannot be captured in a CUDA graph, in the way are {in_the_way}"
    assert in_words([]) == refusal("it", []) == ""
