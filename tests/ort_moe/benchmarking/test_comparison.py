"""ort_moe.bench: every model has a row, measured or with the reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
from onnx import helper

import models.fixtures
from ort_moe.benchmarking import Benchmark, bench, comparison, measurement
from ort_moe.benchmarking.measurement import Point
from ort_moe.errors import EnvironmentUnfitError, ModelError
from ort_moe.files.loading import load_model
from ort_moe.graphs.graph_capture import in_words
from ort_moe.inspection.inspect import inspect
from ort_moe.running.session import CPU, CUDA, ON_CPU
from ort_moe.verification.sample_inputs import Shape
from tests.decode_models import LENGTH, decode_model
from tests.ort_moe.benchmarking.models import EXPORT, not_loadable
from tests.ort_moe.tiny_models import fused, original, save


def statuses(benchmark: Benchmark) -> dict[str, str]:
    """By name of the variant."""
    return {variant.name: variant.status for variant in benchmark.variants}


def test_every_variant_has_its_row(benchmark: Benchmark) -> None:
    assert statuses(benchmark) == {
        "as given": "measured",
        "contrib": "measured",
        "ours": "measured",
        "ours, fp8": "measured",
        "ours, int4": "impossible",
    }
    for variant in benchmark.variants[:4]:
        assert [timing.tokens for timing in variant.timings] == [1, 3]
        assert variant.load_seconds is not None
        assert variant.load_seconds > 0
        assert variant.host_bytes is not None
        assert variant.host_bytes_before is not None
        assert variant.host_bytes >= variant.host_bytes_before > 1 << 20
        assert variant.device_bytes is None
        assert (variant.why, variant.remark) == ("", "")
        for timing in variant.timings:
            assert timing.steps == 2
            assert timing.step_ms is not None
            assert timing.fastest_ms is not None
            assert timing.step_ms >= timing.fastest_ms > 0
            assert (timing.graph_ms, timing.why_no_graph) == (None, "there is none on the CPU")
    assert "the hidden size must be a multiple of 32, but is 16" in benchmark.variants[4].why


def test_the_bytes_of_a_token_by_its_time(benchmark: Benchmark) -> None:
    given, fp8 = benchmark.variants[0], benchmark.variants[3]
    assert given.expert_bytes_per_token == inspect(EXPORT).bytes_per_token
    assert fp8.expert_bytes_per_token is not None
    assert given.expert_bytes_per_token is not None
    assert fp8.expert_bytes_per_token < given.expert_bytes_per_token / 3
    one, three = given.timings
    assert one.step_ms is not None
    assert one.expert_gbps == pytest.approx(given.expert_bytes_per_token / one.step_ms / 1e6)
    assert three.expert_gbps is None  # tokens may share experts
    seen = inspect(EXPORT)
    fixed = [comparison._timing(Point(None, 2, 1.0, 1.0), seen, CPU, tokens) for tokens in (None, 1, 2)]
    assert [timing.expert_gbps is not None for timing in fixed] == [False, True, False]


def test_times_are_held_against_the_model_as_given(benchmark: Benchmark) -> None:
    given, ours = benchmark.variants[0], benchmark.variants[2]
    assert benchmark.times_faster(given, given.timings[0]) is None
    for before, after in zip(given.timings, ours.timings, strict=True):
        assert before.step_ms is not None
        assert after.step_ms is not None
        assert benchmark.times_faster(ours, after) == pytest.approx(before.step_ms / after.step_ms)


def test_it_prints(benchmark: Benchmark) -> None:
    text = str(benchmark)
    assert text.startswith(f"{EXPORT}: on ")
    for heading in ("load", "a token reads", "host memory", "times faster", "GB/s of experts"):
        assert heading in text
    assert "CUDA graph" not in text
    assert "ours, int4: no weights packed: the hidden size must be a multiple of 32" in text


@pytest.mark.usefixtures("in_this_process")
def test_fixed_inputs_are_taken_as_they_are() -> None:
    path = models.fixtures.get("mixtral_block_dynamo_fp32_static").path
    result = bench(path, providers=ON_CPU, tokens=(1, 64), steps=1)
    assert [[timing.tokens for timing in each.timings] for each in result.variants] == [[None]] * 3
    assert "fixed" in str(result)


@pytest.mark.usefixtures("in_this_process")
def test_behind_a_past(tmp_path: Path) -> None:
    """An input with a past's keys has as many rows as tokens went before."""
    model = original()
    model.graph.input.append(helper.make_tensor_value_info("past.key", onnx.TensorProto.FLOAT, ["past_length", 1]))
    model.graph.node.append(helper.make_node("Shape", ["past.key"], ["past"], name="shape"))
    model.graph.output.append(helper.make_tensor_value_info("past", onnx.TensorProto.INT64, [2]))
    source = save(model, tmp_path / "in.onnx")
    result = bench(source, source, providers=ON_CPU, tokens=(1,), steps=1, past=7)
    assert result.past == 7
    assert ", behind 7 tokens\n" in str(result)
    assert [variant.status for variant in result.variants] == ["measured", "impossible", "measured"]
    (feeds, *_) = measurement._draws(load_model(source), Shape(1, 1, 7), seed=0)
    assert feeds["past.key"].shape == (7, 1)


@pytest.mark.parametrize("name", ["qwen3_moe_block_dynamo_fp32", "mixtral_block_dynamo_fp32_static"])
def test_no_past_of_a_model_without(name: str) -> None:
    path = models.fixtures.get(name).path
    with pytest.raises(ModelError, match=rf"^{path} has no input for a past, but 5 tokens shall have gone before$"):
        bench(path, providers=ON_CPU, tokens=(1,), steps=1, past=5)


@pytest.mark.usefixtures("in_this_process")
def test_no_position_is_behind_a_cache(tmp_path: Path) -> None:
    source = save(decode_model(), tmp_path / "decode.onnx")
    assert bench(source, source, providers=ON_CPU, steps=1, past=LENGTH - 1).variants[0].measured
    sentence = f"^the cache holds {LENGTH} tokens, and 1 token behind {LENGTH} others would not fit$"
    with pytest.raises(ModelError, match=sentence):
        bench(source, source, providers=ON_CPU, past=LENGTH)


@pytest.mark.usefixtures("in_this_process")
def test_tokens_that_a_cache_does_not_hold_are_told(tmp_path: Path) -> None:
    model = original()
    for kind, name in ((model.graph.input, "past.key"), (model.graph.output, "present.key")):
        kind.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 1, 32, 4]))
    model.graph.node.append(helper.make_node("Identity", ["past.key"], ["present.key"], name="cache"))
    source = save(model, tmp_path / "in.onnx")
    given = bench(source, source, providers=ON_CPU, tokens=(1, 64), steps=1).variants[0]
    assert [timing.step_ms is not None for timing in given.timings] == [True, False]
    assert given.timings[1].why == "the cache holds 32 tokens, and 64 tokens would not fit"


@pytest.mark.usefixtures("in_this_process")
def test_a_given_optimised_model(tmp_path: Path) -> None:
    source, optimized = save(original(), tmp_path / "in.onnx"), save(fused(), tmp_path / "opt.onnx")
    result = bench(source, optimized, providers=ON_CPU, tokens=(2,), steps=1)
    assert [variant.model for variant in result.variants] == [str(source), None, str(optimized)]
    assert statuses(result)["ours"] == "measured"
    assert "nothing matched" in result.variants[1].why  # one matrix per expert is no experts of MoE
    other = save(original(tokens=4), tmp_path / "other.onnx")
    with pytest.raises(ModelError, match="cannot be compared: 'hidden' is"):
        bench(save(original(tokens=3), tmp_path / "fixed.onnx"), other, providers=ON_CPU)


@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_does_not_load_is_a_row(tmp_path: Path) -> None:
    path = save(not_loadable(), tmp_path / "in.onnx")
    made = bench(path, providers=ON_CPU, tokens=(1,), steps=1).variants[2]
    assert (made.status, made.why.split(":")[0]) == ("failed", "ONNX Runtime does not take it")
    result = bench(path, path, providers=ON_CPU, tokens=(1,), steps=1)
    assert statuses(result) == {"as given": "failed", "contrib": "impossible", "ours": "failed"}
    assert "ONNX Runtime does not take" in result.variants[2].why
    assert "elsewhere" in str(result)
    assert "times faster" not in str(result)
    assert not result.measured


@pytest.mark.usefixtures("in_this_process")
def test_a_shape_that_does_not_run_is_told(tmp_path: Path) -> None:
    """Of eight tokens at most, as models have a longest sequence."""
    model = original()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((4, 1), np.float32), "rows"))
    model.graph.node.append(helper.make_node("Add", ["output", "rows"], ["added"], name="limit"))
    model.graph.output[0].name = "added"
    result = bench(save(model, tmp_path / "in.onnx"), providers=ON_CPU, tokens=(1, 3), steps=1)
    one, three = result.variants[0].timings
    assert one.step_ms is not None
    assert three.step_ms is None
    assert "limit" in three.why
    assert three.why in str(result)


@pytest.mark.usefixtures("in_this_process")
def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "free_host_bytes", lambda: 20_000)
    given, *_, ours = bench(EXPORT, providers=ON_CPU, tokens=(1, 64), steps=1).variants
    one, many = given.timings
    assert one.step_ms is not None
    assert (many.step_ms, many.why[:6]) == (None, "copies")
    assert "of weights, twice over 19.5 KiB of free memory" in many.why
    assert all(timing.step_ms is not None for timing in ours.timings)
    monkeypatch.setattr(comparison, "free_host_bytes", lambda: 1)
    given = bench(EXPORT, providers=ON_CPU, tokens=(64,), steps=1).variants[0]
    assert (given.status, given.why) == ("failed", "nothing fits into memory")


def test_what_is_in_the_way_of_a_graph_is_named() -> None:
    point = Point(1, 2, 1.0, 1.0, graph_refusal="what ONNX Runtime says")
    free, blocked = inspect(EXPORT), inspect(models.fixtures.get("mixtral_block_transformers_grouped_fp32").path)
    assert comparison._timing(point, free, CUDA, 1).why_no_graph == "what ONNX Runtime says"
    told = comparison._timing(point, blocked, CUDA, 1).why_no_graph
    assert told == in_words(blocked.blockers)
    assert "Range (the size of its output depends on data): " in told
    assert comparison._timing(Point(1, refusal="no"), free, CUDA, 1).why_no_graph == "it does not run"
    captured = comparison._timing(Point(1, 2, 1.0, 1.0, 0.25), free, CUDA, 1)
    assert (captured.why_no_graph, captured.best_ms) == ("", 0.25)
    assert comparison._timing(point, blocked, CPU, 1).why_no_graph == "there is none on the CPU"


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="steps and numbers of tokens are above 0, but 1 and 1, 0 came"):
        bench(EXPORT, tokens=(1, 0), steps=1)
    with pytest.raises(ValueError, match=r"the format of weights 'int3' is unknown; there are keep, "):
        bench(EXPORT, weights=("int3",))
    with pytest.raises(ValueError, match="weights are packed where the optimised model is made, but one is given"):
        bench(EXPORT, EXPORT, weights=("int8",))
    with pytest.raises(ValueError, match="past tokens are 0 or more, but -1 came"):
        bench(EXPORT, past=-1)
    for providers, told in (["TensorrtExecutionProvider", CPU], "TensorrtExecutionProvider, "), ([], "no provider"):
        with pytest.raises(ValueError, match=f"measured on {CUDA} or {CPU}, but {told}"):
            bench(EXPORT, providers=providers)
    with pytest.raises(
        ValueError, match=r"on providers without options, but \[\('CPUExecutionProvider', \{\}\)\] came"
    ):
        bench(EXPORT, providers=cast(Any, [(CPU, {})]))
    with pytest.raises(ModelError, match="No such file"):
        bench(tmp_path / "missing.onnx")
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(EnvironmentUnfitError, match=r"missing\.so"):
        bench(EXPORT)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_moe_block_dynamo_fp16", "mixtral_block_dynamo_fp32"])
def test_on_cuda_everything_is_captured(name: str) -> None:
    result = bench(models.fixtures.get(name).path, providers=[CUDA], tokens=(1, 8), steps=5)
    given, contrib, ours = result.variants
    assert contrib.measured or contrib.why  # not every ONNX Runtime has a kernel for every type
    for variant in (given, ours):
        assert variant.device_bytes is not None
        for timing in variant.timings:
            assert timing.step_ms is not None, timing.why
            assert timing.graph_ms is not None, f"{variant.name}: {timing.why_no_graph}"
    assert "CUDA graph" in str(result)
    assert "GPU memory" in str(result)


@pytest.mark.gpu
def test_on_cuda_a_decode_graph_is_captured_over_its_cache(tmp_path: Path) -> None:
    source = save(decode_model(np.float16), tmp_path / "decode.onnx")
    (timing,) = bench(source, source, providers=[CUDA], steps=5, past=9).variants[0].timings
    assert timing.step_ms is not None, timing.why
    assert timing.graph_ms is not None, timing.why_no_graph


@pytest.mark.gpu
def test_on_cuda_what_cannot_be_captured_runs_without() -> None:
    result = bench(models.fixtures.get("mixtral_block_transformers_grouped_fp32").path, providers=[CUDA], steps=3)
    given, *_, ours = result.variants
    assert given.measured
    assert all(timing.graph_ms is None and timing.why_no_graph for timing in given.timings)
    assert all(timing.graph_ms is not None for timing in ours.timings)
