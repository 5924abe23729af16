"""One model in one process: what is fed arrives, what is timed is counted."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

import models.fixtures
from ort_moe.benchmarking import child_process, measurement
from ort_moe.benchmarking.child_process import measure_apart
from ort_moe.benchmarking.machine import free_host_bytes, most_host_bytes, processor, processor_name
from ort_moe.benchmarking.measurement import DRAWS, LEAST, WARM_UP, Order
from ort_moe.errors import EnvironmentUnfitError, ModelError
from ort_moe.files.loading import load_model
from ort_moe.graphs.shared_state import copied_state, fixed_state
from ort_moe.running.fixed_buffer import Device
from ort_moe.running.session import CPU, CUDA, session
from ort_moe.verification.sample_inputs import Feeds, Shape
from tests.decode_models import decode_model
from tests.graph_session import RUNS_UNTIL_CAPTURED, GraphSession
from tests.ort_moe.tiny_models import original, save

ORDER = Order("", "", CPU, (1,), 0, 1, 0)


def order(path: Path) -> Order:
    """Of one model by itself."""
    return Order(str(path), str(path), CPU, (1,), 0, 1, 0)


@pytest.mark.parametrize("name", ["qwen3_moe_block_dynamo_fp16", "mixtral_causal_lm_dynamo_fp32"])
def test_bound_runs_compute_what_the_session_does(name: str) -> None:
    path = models.fixtures.get(name).path
    created = session(path, [CPU])
    drawn = measurement._draws(load_model(path), Shape(1, 3), seed=5)
    assert len(drawn) == DRAWS
    assert len({str([feeds[key].tolist() for key in feeds]) for feeds in drawn}) == DRAWS
    run = fed(created, path, drawn)
    for n in (0, 1, DRAWS + 2):
        run.feed(n)
        run()
        expected = created.run(None, drawn[n % DRAWS])
        for value, array in zip(run.outputs(), expected, strict=True):
            np.testing.assert_array_equal(value, array)


def fed(created: Any, path: Path, drawn: Sequence[Feeds], device: str = "cpu", graph: str | None = None) -> Any:
    """Runs with the state of the model at `path`."""
    model = load_model(path)
    state = fixed_state(model)
    copied = copied_state(model, state)
    return measurement._FedRun(created, drawn, Device(device), graph, state=state, copied=copied)


@pytest.mark.parametrize("captured", [False, True])
def test_a_cache_of_fixed_length_stays_in_its_buffers(tmp_path: Path, captured: bool) -> None:
    """Bound once as a decode loop binds it, and fed with all but the cache; so also where replays are played."""
    path = save(decode_model(), tmp_path / "decode.onnx")
    created = GraphSession(str(path))
    model = load_model(path)
    drawn = measurement._draws(model, Shape(1, 1, 9), seed=3)
    caches = {"past_key_values.0.key", "past_key_values.0.value"}
    assert [drawn[0].keys() - feeds.keys() for feeds in drawn] == [set(), *[caches] * (DRAWS - 1)]
    assert not caches & copied_state(model, fixed_state(model)).keys()
    run = fed(created, path, drawn, graph="-1")
    if captured:
        run.capture_as("1")
    for n in range(DRAWS + 1):
        run.feed(n)
        before = run.inputs()
        assert all((before[name] == drawn[n % DRAWS][name]).all() for name in drawn[1])
        run()
        if captured and n == 0:
            assert created.runs == 1 + RUNS_UNTIL_CAPTURED
            continue  # the warm-ups have moved the rest of the state
        expected = dict(zip([value.name for value in created.get_outputs()], created.run(None, before), strict=True))
        after = run.inputs()
        for value, name in zip(run.outputs(), expected, strict=True):
            np.testing.assert_array_equal(value, expected[name])
        for past, present in fixed_state(model).items():
            np.testing.assert_array_equal(after[past], expected[present])
    assert (before["past_key_values.0.key"][:, :, 9] != drawn[0]["past_key_values.0.key"][:, :, 9]).any()
    assert (before["past_key_values.0.key"][:, :, 10:] == drawn[0]["past_key_values.0.key"][:, :, 10:]).all()


def test_a_cache_that_shares_no_buffer_is_copied(tmp_path: Path) -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[1, 1, 4, 2] past, float[1, 1, 4, 2] x) => (float[1, 1, 4, 2] present, float[1, 1, 4, 2] y)
        { present = Add (past, x) y = Sub (present, past) }"""
    )
    path = save(model, tmp_path / "late.onnx")
    drawn = measurement._draws(load_model(path), Shape(1, 1), seed=0)
    assert list(copied_state(load_model(path), {"past": "present"})) == ["past"]
    run = fed(session(path, [CPU]), path, drawn)
    total = drawn[0]["past"].copy()
    for n in range(3):
        run.feed(n)
        run()
        total += drawn[n]["x"]
        np.testing.assert_array_equal(run.inputs()["past"], total)
        np.testing.assert_allclose(run.outputs()[1], drawn[n]["x"], atol=1e-6)


@pytest.mark.gpu
def test_replays_compute_what_runs_do() -> None:
    path = models.fixtures.get("qwen3_moe_block_dynamo_fp16").path
    created, _, refusal = measurement._load(str(path), on_cuda=True)
    assert not refusal
    drawn = measurement._draws(load_model(path), Shape(1, 3), seed=5)
    plain = fed(created, path, drawn, "cuda", "-1")
    replayed = fed(created, path, drawn, "cuda", "-1")
    replayed.capture_as("1")
    for n in range(DRAWS + 2):
        for run in (plain, replayed):
            run.feed(n)
            run()
        for value, array in zip(replayed.outputs(), plain.outputs(), strict=True):
            np.testing.assert_array_equal(value, array)


def test_runs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    ran: list[int] = []
    times = measurement._times(lambda: ran.append(0), fed.append, 5)
    assert (len(times), len(ran)) == (5, WARM_UP + 5)
    assert fed == list(range(WARM_UP + 5))
    assert WARM_UP >= DRAWS  # each has run before it is timed
    monkeypatch.setattr(measurement, "PATIENCE", 0.0)
    ran.clear()
    assert len(measurement._times(lambda: ran.append(0), lambda _: None, 50)) == LEAST
    assert len(ran) == 2 * LEAST
    assert len(measurement._times(lambda: None, lambda _: None, 2)) == 2


def test_another_process_measures(tmp_path: Path) -> None:
    mine = np.ones(512 << 20, np.uint8)
    measured = measure_apart(order(save(original(), tmp_path / "model.onnx")))
    (point,) = measured.points
    assert (point.tokens, point.steps, point.refusal) == (1, 1, "")
    assert measured.device_bytes is None
    assert measured.host_bytes_before <= measured.host_bytes < mine.nbytes  # it has none of what is this one's


def test_modules_of_the_working_folder_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert measure_apart(order(save(original(), tmp_path / "model.onnx"))).points


def test_errors_of_the_other_process_are_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(original(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"cannot read .*absent\.onnx: No such file"):
        measure_apart(Order(str(tmp_path / "absent.onnx"), str(path), CPU, (1,), 0, 1, 0))
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(EnvironmentUnfitError, match=r"missing\.so"):
        measure_apart(order(path))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL, as where memory runs out"),
        ("import os; os.abort()", "its process was ended by SIGABRT"),
        ("raise SystemExit('a disk is full')", "its process ended with 1 and said a disk is full"),
        ("raise SystemExit(7)", "its process ended with 7 and said nothing"),
        ("pass", "its process ended with 0 and said nothing"),
    ],
)
def test_a_process_that_breaks_down(monkeypatch: pytest.MonkeyPatch, code: str, sentence: str) -> None:
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **how: real([command[0], "-c", code], **how))
    with pytest.raises(ModelError) as raised:
        measure_apart(ORDER)
    assert str(raised.value) == sentence


def test_without_cuda_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the session says of a provider that is not there is what the row says."""
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    path = str(save(original(), tmp_path / "model.onnx"))
    with pytest.raises(EnvironmentUnfitError, match="has no CUDAExecutionProvider"):
        measurement.measure(Order(path, path, CUDA, (1,), 0, 1, 0))


def test_a_graph_that_is_refused_leaves_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    attempts = itertools.count()

    def create(model: str, providers: object) -> tuple[str, float]:
        asked.append(providers)
        if next(attempts) == 0:
            raise ModelError("ONNX Runtime does not take it: control flow nodes")
        return model, 0.5

    monkeypatch.setattr(measurement, "_timed_session", create)
    assert measurement._load("m", on_cuda=True) == ("m", 0.5, "ONNX Runtime does not take it: control flow nodes")
    assert [providers[0][1] for providers in asked] == [{"enable_cuda_graph": "1"}, {"enable_cuda_graph": "0"}]
    assert measurement._load("m", on_cuda=True) == ("m", 0.5, "")
    assert measurement._load("m", on_cuda=False)[2] == ""


def test_the_answer_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it passes between the processes."""
    path, answer = save(original(), tmp_path / "model.onnx"), tmp_path / "answer.json"
    given = json.dumps({**vars(order(path)), "tokens": [1, 2]})
    monkeypatch.setattr("sys.argv", ["child_process", given, str(answer)])
    child_process.answer_order()
    document = json.loads(answer.read_text())
    assert [point["tokens"] for point in document["points"]] == [1, 2]


def test_memory_is_this_processes_own() -> None:
    before = most_host_bytes()
    block = np.ones(32 << 20, np.uint8)
    assert most_host_bytes() >= before
    assert block.sum() == 32 << 20
    assert most_host_bytes() > 32 << 20
    assert free_host_bytes() > 0
    assert "flags" in processor() or "Features" in processor()
    assert "processors" in processor_name()
