"""Decode loops beside what ONNX Runtime does with CUDA graphs, played on the CPU by tests/graph_session.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ort_moe.running.decode_loop
import ort_moe.running.fixed_buffer
from ort_moe import DecodeError, DecodeLoop
from tests.decode_models import Array, decode_model, empty_state, plain_step, step_inputs
from tests.graph_session import RUNS_UNTIL_CAPTURED, GraphSession
from tests.ort_moe.running.test_decode_loop import assert_same, cpu_session, refusal


@pytest.fixture(autouse=True)
def buffers_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop still takes its session for one on CUDA."""
    real = ort_moe.running.fixed_buffer.FixedBuffer.__init__

    def create(self: Any, name: str, shape: Any, element: Any, device: ort_moe.running.fixed_buffer.Device) -> None:
        assert device == ort_moe.running.fixed_buffer.Device("cuda", 0)
        real(self, name, shape, element, ort_moe.running.fixed_buffer.Device("cpu"))

    monkeypatch.setattr(ort_moe.running.fixed_buffer.FixedBuffer, "__init__", create)


def expected_steps(count: int) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Of plain runs: what each returns, and the state after them."""
    session, state = cpu_session(decode_model()), empty_state()
    return [plain_step(session, step_inputs(step), state) for step in range(count)], state


def test_captures_once_and_replays() -> None:
    """Other inputs at each step, and a state that no run but the steps' own has moved."""
    session = GraphSession(decode_model())
    loop = DecodeLoop(session)
    assert loop.captures
    expected, state = expected_steps(5)
    for step, outputs in enumerate(expected):
        assert_same(loop.step(**step_inputs(step)), outputs)
        assert session.runs == RUNS_UNTIL_CAPTURED + 1 + step
    assert_same(loop.read_state(), {name: state[name] for name in loop.state})
    assert len(session.graphs) == 1


def test_state_that_was_written_before_the_capture_is_kept() -> None:
    expected, _ = expected_steps(3)
    first = DecodeLoop(GraphSession(decode_model()))
    for step in range(2):
        first.step(**step_inputs(step))
    then = DecodeLoop(GraphSession(decode_model()))
    then.write_state(first.read_state())
    assert_same(then.step(**step_inputs(2)), expected[2])
    then.reset()
    assert_same(then.step(**step_inputs(0)), expected[0])


def test_a_second_thread_captures_for_itself() -> None:
    session = GraphSession(decode_model())
    loop, got = DecodeLoop(session), []
    expected, _ = expected_steps(3)
    got.append(loop.step(**step_inputs(0)))
    other = threading.Thread(target=lambda: got.append(loop.step(**step_inputs(1))))
    other.start()
    other.join()
    got.append(loop.step(**step_inputs(2)))
    for outputs, right in zip(got, expected, strict=True):
        assert_same(outputs, right)
    assert len(session.graphs) == 2


def test_a_capture_that_fails_leaves_the_state() -> None:
    session = GraphSession(decode_model())
    loop = DecodeLoop(session)
    loop.write_state({"past_length": np.full((2, 1), 256)})
    before = loop.read_state()
    with pytest.raises(DecodeError, match="out of data bounds"):
        loop.step(**step_inputs(0))
    assert_same(loop.read_state(), before)


def test_without_a_graph() -> None:
    session = GraphSession(decode_model(), enabled=False)
    loop = DecodeLoop(session, graph=False)
    assert not loop.captures
    expected, _ = expected_steps(2)
    for step, outputs in enumerate(expected):
        assert_same(loop.step(**step_inputs(step)), outputs)
    assert session.runs == 2
    assert not session.graphs


def test_loops_of_one_session() -> None:
    """Side by side they need graphs of their own; that of a loop which is no more is still the session's."""
    session = GraphSession(decode_model())
    one, two = DecodeLoop(session), DecodeLoop(session, graph_id=2)
    expected, _ = expected_steps(2)
    for step, outputs in enumerate(expected):
        assert_same(one.step(**step_inputs(step)), outputs)
        assert_same(two.step(**step_inputs(step)), outputs)
    del one
    told = "the session already has a loop with graph_id 1, whose graph would be replayed"
    assert refusal(session).startswith(told)
    DecodeLoop(GraphSession(decode_model()))
    DecodeLoop(session, graph=False)


def test_a_session_without_graphs() -> None:
    told = refusal(GraphSession(decode_model(), enabled=False))
    assert told.startswith("the session captures no CUDA graph: create it with providers=[")
    assert '{"enable_cuda_graph": "1"}' in told


@pytest.mark.parametrize(
    ("blocker", "told"),
    [
        ("If", "If (control flow): doubling"),
        ("NonZero", "NonZero (the size of its output depends on data): find"),
    ],
)
def test_nodes_in_the_way_are_named(blocker: str, told: str, tmp_path: Path) -> None:
    model = decode_model(blocker=blocker)
    for enabled in (True, False):
        expected = f"the model cannot be captured in a CUDA graph, in the way are {told}"
        assert refusal(GraphSession(model, enabled=enabled)) == expected
    path = tmp_path / "decode.onnx"
    onnx.save(model, path)
    session = GraphSession(str(path))
    assert told in refusal(session)
    path.unlink()  # what cannot be read is not looked at
    DecodeLoop(session)


def test_control_flow_runs_without_a_graph() -> None:
    session = GraphSession(decode_model(blocker="If"), enabled=False)
    plain, state = cpu_session(decode_model(blocker="If")), empty_state()
    loop = DecodeLoop(session, graph=False)
    for step in range(3):
        assert_same(loop.step(**step_inputs(step)), plain_step(plain, step_inputs(step), state))


def test_other_providers() -> None:
    class Elsewhere(GraphSession):
        def get_providers(self) -> list[str]:
            return ["TensorrtExecutionProvider"]

    told = refusal(Elsewhere(decode_model()))
    assert told == (
        "a DecodeLoop runs on CUDAExecutionProvider or CPUExecutionProvider, but the session on "
        "TensorrtExecutionProvider"
    )
