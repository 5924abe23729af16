"""A session that shall capture a CUDA graph: which nodes are in the way, where ONNX Runtime names none.

ONNX Runtime's side is played on the CPU: it refuses every model with `enable_cuda_graph`, and without gives all nodes
to the CPU. tests/ort_moe/running/test_session_capture_cuda.py has the real one.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnx import parser

import ort_moe
from ort_moe import ModelError
from ort_moe.running.session import CPU, CUDA

GRAPH = (CUDA, {"enable_cuda_graph": "1"})
REFUSAL = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the graph capture feature as requested by the user as all "
    "compute graph nodes have not been partitioned to the CUDAExecutionProvider"
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The providers with which sessions were asked for, one list each."""
    asked: list[Any] = []
    real = onnxruntime.InferenceSession

    def create(model: Any, options: Any, providers: Any) -> Any:
        if providers == [CPU]:  # to learn which versions of ONNX it reads
            return real(model, options, providers=providers)
        asked.append(providers)
        if str(providers[0][1]["enable_cuda_graph"]) == "1":
            raise RuntimeError(REFUSAL)
        return real(model, options, providers=[CPU])

    monkeypatch.setattr(onnxruntime, "InferenceSession", create)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(
        importlib.import_module("ort_moe.running.session"), "build_info", lambda: {"cuda": {"toolkit": "13.0"}}
    )
    return asked


def refusal(model: onnx.ModelProto | Path) -> str:
    source = model if isinstance(model, Path) else model.SerializeToString()
    with pytest.raises(ModelError) as caught:
        ort_moe.session(source, [GRAPH, CPU])
    return str(caught.value)


def model(body: str) -> onnx.ModelProto:
    made = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[2, n] x, bool[1] b) => (float[2, n] y) {{ {body} }}'
    )
    for node in made.graph.node:
        node.name = f"the_{node.output[0]}"
    return made


def test_nodes_on_the_cpu_are_named(asked: list[Any]) -> None:
    told = refusal(model("s = Shape (x) r = Reshape (x, s) y = Neg (r)"))
    assert told == (
        "the model cannot be captured in a CUDA graph, in the way are Reshape (it runs on the CPU): the_r; "
        "Neg (it runs on the CPU): the_y"
    )
    assert asked == [[GRAPH, CPU], [(CUDA, {"enable_cuda_graph": "0"}), CPU]]


def test_control_flow_is_named_once(asked: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        model(
            "y = If (b) <then_branch = t () => (float[2, n] c) { c = Identity (x) }, "
            "else_branch = e () => (float[2, n] d) { d = Neg (x) }>"
        ),
        path,
    )
    told = refusal(path)
    assert told.startswith(f"{path} cannot be captured in a CUDA graph, in the way are If (control flow): the_y")
    assert told.count("the_y") == 1


def test_what_is_wrong_without_a_graph_too_is_left_to_onnxruntime(asked: list[Any], tmp_path: Path) -> None:
    broken = model("y = Neg (x)")
    broken.graph.node[0].op_type = "NoSuchOperator"
    assert "in the way" not in refusal(broken)
    assert refusal(broken).startswith("ONNX Runtime does not take the model: ")
    path = tmp_path / "none.onnx"
    path.write_bytes(b"no model")
    assert refusal(path).startswith(f"ONNX Runtime does not take {path}: ")


def test_sessions_without_a_graph_are_made_once(asked: list[Any]) -> None:
    broken = model("y = Neg (x)")
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match="ONNX Runtime does not take the model"):
        ort_moe.session(broken.SerializeToString(), [(CUDA, {"enable_cuda_graph": 0}), CPU])
    assert len(asked) == 1
