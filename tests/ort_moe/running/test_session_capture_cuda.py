"""Which nodes keep a session on CUDA from capturing a graph."""

from __future__ import annotations

import pytest
from onnx import parser

import ort_moe
from ort_moe import ModelError

pytestmark = pytest.mark.gpu

PROVIDERS = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"}), "CPUExecutionProvider"]
HEADER = '<ir_version: 10, opset_import: ["": 20, "ai.onnx.ml": 3]>'


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            'n = Neg (x) m = ai.onnx.ml.Normalizer <norm = "L2"> (n) y = Neg (m)',
            "Normalizer (it runs on the CPU): the_m",
        ),
        (
            "y = If (b) <then_branch = t () => (float[2, 3] c) { c = Identity (x) }, "
            "else_branch = e () => (float[2, 3] d) { d = Neg (x) }>",
            "If (control flow): the_y",
        ),
    ],
)
def test_nodes_in_the_way_are_named(body: str, told: str) -> None:
    model = parser.parse_model(f"{HEADER} g (float[2, 3] x, bool[1] b) => (float[2, 3] y) {{ {body} }}")
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
    with pytest.raises(ModelError, match="the model cannot be captured in a CUDA graph, in the way are ") as caught:
        ort_moe.session(model.SerializeToString(), PROVIDERS)
    assert told in str(caught.value)


def test_nodes_that_compute_sizes_may_be_on_the_cpu() -> None:
    body = "s = Shape (x) f = Gather (s, order) z = Reshape (x, f) y = Neg (z)"
    model = parser.parse_model(
        f"{HEADER} g (float[n, 3] x) => (float[3, n] y) <int64[2] order = {{1, 0}}> {{ {body} }}"
    )
    assert ort_moe.session(model.SerializeToString(), PROVIDERS).get_providers()[0] == "CUDAExecutionProvider"
