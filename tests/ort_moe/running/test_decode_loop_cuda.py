"""Decode loops on CUDA: a graph that is captured and replayed has the bits of plain runs."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import ort_moe
from ort_moe import DecodeError, DecodeLoop
from tests.decode_models import Array, decode_model, empty_state, plain_step, step_inputs
from tests.op_models import ort_value
from tests.ort_moe.running.test_decode_loop import assert_same, refusal

pytestmark = pytest.mark.gpu


def cuda_session(model: onnx.ModelProto, *, graph: bool = True) -> onnxruntime.InferenceSession:
    options = {"enable_cuda_graph": "1" if graph else "0", "use_tf32": "0"}
    return ort_moe.session(model.SerializeToString(), [("CUDAExecutionProvider", options), "CPUExecutionProvider"])


def expected_steps(count: int, dtype: Any = np.float32) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Of plain runs: what each returns, and the state after them."""
    session, state = cuda_session(decode_model(dtype), graph=False), empty_state(dtype)
    return [plain_step(session, step_inputs(step, dtype), state) for step in range(count)], state


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_replays_are_plain_runs(dtype: Any) -> None:
    """As many as the cache holds, each with inputs of its own."""
    loop = DecodeLoop(cuda_session(decode_model(dtype)))
    assert loop.captures
    assert [*loop.copied_state] == ["past_length"]
    expected, state = expected_steps(256, dtype)
    for step, outputs in enumerate(expected):
        assert_same(loop.step(**step_inputs(step, dtype)), outputs)
    assert_same(loop.read_state(), {name: state[name] for name in loop.state})


def test_the_capture_moves_no_state() -> None:
    """Neither what was there before nor what follows; a loop that starts from it and one that is reset."""
    expected, state = expected_steps(3)
    first = DecodeLoop(cuda_session(decode_model()))
    first.step(**step_inputs(0))
    kept = first.read_state()
    assert (kept["past_length"] == 1).all()
    then = DecodeLoop(cuda_session(decode_model()))
    then.write_state(kept)
    for step in (1, 2):
        assert_same(then.step(**step_inputs(step)), expected[step])
    assert_same(then.read_state(), {name: state[name] for name in then.state})
    then.reset()
    assert_same(then.step(**step_inputs(0)), expected[0])


def test_a_loop_without_a_graph() -> None:
    session = cuda_session(decode_model(), graph=False)
    assert refusal(session).startswith("the session captures no CUDA graph: create it with providers=[")
    loop = DecodeLoop(session, graph=False)
    expected, _ = expected_steps(3)
    for step, outputs in enumerate(expected):
        assert_same(loop.step(**step_inputs(step)), outputs)


def test_values_that_stay_on_the_device() -> None:
    """What one loop leaves there is an input, and a state, of another."""
    expected, _ = expected_steps(2)
    text = "g (float[2, 1, 16] x) => (float[2, 1, 16] y) { y = Neg (x) }"
    negate = DecodeLoop(
        cuda_session(parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')), on_device=True
    )
    loop = DecodeLoop(cuda_session(decode_model()), on_device=["logits"])
    for step, outputs in enumerate(expected):
        inputs = step_inputs(step)
        nudge = negate.step(x=-inputs["nudge"])["y"]
        assert nudge.device_name() == "cuda"
        got = loop.step(input_ids=inputs["input_ids"], nudge=nudge)
        assert got["logits"].device_name() == "cuda"
        assert_same({**got, "logits": got["logits"].numpy()}, outputs)
    mean = np.full((2, 1, 16), 3, np.float32)
    loop.write_state({"past_mean": negate.step(x=-mean)["y"]})
    assert_same(loop.read_state("past_mean"), {"past_mean": mean})


def test_loops_of_one_session() -> None:
    session = cuda_session(decode_model())
    one, two = DecodeLoop(session), DecodeLoop(session, graph_id=2)
    expected, _ = expected_steps(4)
    for step, outputs in enumerate(expected):
        assert_same(one.step(**step_inputs(step)), outputs)
        assert_same(two.step(**step_inputs(step)), outputs)
    del one
    assert refusal(session).startswith("the session already has a loop with graph_id 1")


def test_a_second_thread() -> None:
    loop, got = DecodeLoop(cuda_session(decode_model())), []
    expected, _ = expected_steps(4)

    def go(step: int) -> None:
        got.append(loop.step(**step_inputs(step)))

    for step in range(4):
        if step % 2:
            other = threading.Thread(target=go, args=(step,))
            other.start()
            other.join()
        else:
            go(step)
    for outputs, right in zip(got, expected, strict=True):
        assert_same(outputs, right)


@pytest.mark.parametrize(
    ("element", "dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("bool", np.bool_)]
)
def test_types(element: str, dtype: Any) -> None:
    pair = f"({element}[2, 3] x, {element}[2, 3] past_x) => ({element}[2, 3] present_x, {element}[2, 3] y)"
    op = "And" if element == "bool" else "Mul"  # of zeros and ones: their square is themselves
    body = f"{{ y = {op} (past_x, past_x) present_x = {op} (x, x) }}"
    text = f'<ir_version: 10, opset_import: ["": 20]> g {pair} {body}'
    loop = DecodeLoop(cuda_session(parser.parse_model(text)))
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    for expected in (np.zeros_like(x), x, x):
        assert_same(loop.step(x=x), {"y": expected})


def test_bfloat16_from_a_plain_run() -> None:
    """What ONNX Runtime has left on the device, in a type that NumPy lacks."""
    text = '<ir_version: 10, opset_import: ["": 20]> g (bfloat16[3] x) => (bfloat16[3] y) { y = Mul (x, x) }'
    model = parser.parse_model(text)
    session, loop = cuda_session(model, graph=False), DecodeLoop(cuda_session(model))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort_value(np.array([1, 2, 3], ml_dtypes.bfloat16)))
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    (square,) = binding.get_outputs()
    assert square.device_name() == "cuda"
    assert_same(loop.step(x=square), {"y": np.array([1, 16, 81], ml_dtypes.bfloat16)})


def test_nodes_in_the_way_are_named() -> None:
    """Before anything runs: ONNX Runtime has let this one pass."""
    why = "NonZero (the size of its output depends on data): find"
    told = refusal(cuda_session(decode_model(blocker="NonZero")))
    assert told == f"the model cannot be captured in a CUDA graph, in the way are {why}"


def test_cuda_and_cpu_agree() -> None:
    cpu, cuda = (
        DecodeLoop(session)
        for session in (
            ort_moe.session(decode_model().SerializeToString(), ["CPUExecutionProvider"]),
            cuda_session(decode_model()),
        )
    )
    for step in range(8):
        one, other = cpu.step(**step_inputs(step)), cuda.step(**step_inputs(step))
        np.testing.assert_array_equal(other["chosen"], one["chosen"])
        np.testing.assert_allclose(other["logits"], one["logits"], rtol=1e-2, atol=1e-2)
    with pytest.raises(DecodeError, match="'input_ids' is missing"):
        cuda.step()
