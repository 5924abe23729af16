"""optimize: fuses, proves, and puts in place only what is proved."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import models.fixtures
import ort_moe
from ort_moe.errors import ModelError, OutputError, VerificationError
from ort_moe.ops import DOMAIN
from ort_moe.optimization.optimize import optimize
from ort_moe.verification import SiteCheck, Verification
from tests.ort_moe.tiny_models import original, save
from tests.rewrites.expert_loops import loop_over_hits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return save(original(), folder / "model.onnx", data="weights.bin")


def _fused_nodes(path: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(path, load_external_data=False).graph.node if node.domain == DOMAIN]


def _classifier(path: Path) -> Path:
    """A model whose TopK is no router: the best classes."""
    model = original()
    del model.graph.node[3:]
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, None))
    return save(model, path)


def test_a_value_of_another_type_than_the_file_says(tmp_path: Path) -> None:
    """ONNX Runtime loads no such file; what it says of the original is told, and nothing is written."""
    model = original()
    model.graph.value_info.append(
        onnx.helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT16, ["tokens", 16])
    )
    path, output = save(model, tmp_path / "model.onnx"), tmp_path / "out.onnx"
    with pytest.raises(ModelError, match=r"cannot load .*model\.onnx: .* \(probabilities\) .* expected type") as raised:
        optimize(path, output)
    assert "\n" not in str(raised.value)
    assert not output.exists()


def test_the_public_name_is_the_function() -> None:
    assert ort_moe.optimize is optimize


@pytest.mark.parametrize("name", ["mixtral_causal_lm_dynamo_fp32", "deepseek_v3_block_dynamo_fp16"])
def test_fixture_runs_without_our_library(tmp_path: Path, name: str) -> None:
    fixture = models.fixtures.get(name)
    output = tmp_path / "out.onnx"
    report = optimize(fixture.path, output)
    assert report.matched
    assert report.output == str(output)
    assert report.verification is not None
    assert report.verification.passed
    fused = [node.op_type for node in _fused_nodes(output)]
    assert fused == ["FusedRouter", "FusedExperts"] * fixture.layers
    assert [each.block for each in report.experts] == ["whole"] * fixture.layers
    feeds = fixture.sample_inputs()
    expected, got = (onnxruntime.InferenceSession(path).run(None, feeds)[0] for path in (fixture.path, output))
    assert np.abs(got - expected).max() <= (1e-2 if fixture.precision == "fp16" else 1e-5) * np.abs(expected).max()


def test_output_is_complete_in_another_folder(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "model.onnx"
    output.parent.mkdir()
    optimize(source, output)
    for file in source.parent.iterdir():
        file.unlink()
    onnxruntime.InferenceSession(output)
    assert sorted(p.name for p in output.parent.iterdir()) == ["model.onnx", "weights.bin"]


def test_other_nodes_of_ours_are_no_fused_routers(tmp_path: Path) -> None:
    """Here one that has the router's name, as nodes without a name all have."""
    model = original()
    next(node for node in model.graph.node if node.op_type == "TopK").name = "same"
    inputs = {
        "rows": (onnx.TensorProto.FLOAT, [6, 4]),
        "weights_of_rows": (onnx.TensorProto.FLOAT, [3, 2]),
        "indices_of_rows": (onnx.TensorProto.INT32, [3, 2]),
        "rows_of_choices": (onnx.TensorProto.INT32, [6]),
    }
    model.graph.node.append(
        onnx.helper.make_node("FinalizeRouting", list(inputs), ["finalized"], "same", domain=DOMAIN)
    )
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, *type_and_shape) for name, type_and_shape in inputs.items()
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("finalized", onnx.TensorProto.FLOAT, [3, 4]))
    model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    path = save(model, tmp_path / "model.onnx")
    report = optimize(path)
    assert (report.matched, report.already_fused) == (True, 0)
    assert "of them before" not in str(report)
    assert [layer.kind for layer in ort_moe.inspect(path).layers] == ["router"]


def test_second_run_changes_nothing(source: Path) -> None:
    once, twice = source.with_name("once.onnx"), source.with_name("twice.onnx")
    optimize(source, once)
    report = optimize(once, twice)
    assert once.read_bytes() == twice.read_bytes()
    assert not report.matched
    assert report.verification is None
    assert "already optimised (1 fused router), nothing changed" in " ".join(str(report).split())


def test_experts_alone_are_told_so() -> None:
    report = optimize(models.fixtures.get("mixtral_block_dynamo_fp32").path)
    left = tuple(dataclasses.replace(site, status="left") for site in report.sites)
    told = " ".join(str(dataclasses.replace(report, sites=left)).split())
    assert ": experts of 1 router fused, no router" in told


def test_no_match_writes_the_input(tmp_path: Path) -> None:
    path, output = _classifier(tmp_path / "model.onnx"), tmp_path / "out.onnx"
    report = optimize(path, output)
    assert not report.matched
    assert "nothing matched, nothing changed" in " ".join(str(report).split())
    assert [node.op_type for node in onnx.load(output).graph.node] == ["MatMul", "Softmax", "TopK"]


def test_required_match_writes_nothing(tmp_path: Path) -> None:
    report = optimize(_classifier(tmp_path / "model.onnx"), tmp_path / "out.onnx", require_match=True)
    assert report.output is None
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert str(report).splitlines()[-1] == "nothing written"


def test_dry_run_writes_nothing(source: Path) -> None:
    before = sorted(source.parent.iterdir())
    report = optimize(source)
    assert report.matched
    assert report.output is None
    assert sorted(source.parent.iterdir()) == before


def test_failed_verification_puts_nothing_in_place(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SiteCheck("router", "failed", detail="weights differ")
    seen: list[Path] = []

    def failing(reference: Any, optimized: Any, **_: Any) -> Verification:
        seen.append(Path(optimized))
        assert seen[0].exists()
        return Verification(str(reference), str(optimized), (site,), (), 1e-4)

    monkeypatch.setattr("ort_moe.verification.verify", failing)
    output = source.with_name("out.onnx")
    before = source.read_bytes()
    output.write_bytes(before)
    with pytest.raises(
        VerificationError, match=r"nothing was put in place: the first router .* weights differ"
    ) as caught:
        optimize(source, output, force=True)
    assert caught.value.verification is not None
    assert output.read_bytes() == before
    assert not seen[0].exists()
    assert sorted(p.name for p in source.parent.iterdir()) == ["model.onnx", "out.onnx", "weights.bin"]


def test_an_original_that_does_not_run_has_a_loop_baked_into_the_export(tmp_path: Path) -> None:
    source = tmp_path / "eager.onnx"
    ir.save(loop_over_hits("step_1, step_2, step_3 = Split <axis = 0> (list, steps)"), source)
    sentence = "the original does not run: .* OM013 expert-loop-baked-in: Split 'split_11' runs 3 of the 8 experts"
    with pytest.raises(ModelError, match=f"nothing was put in place: nothing could be verified at .*: {sentence}"):
        optimize(source, tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["eager.onnx"]


def test_interrupt_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ort_moe.verification.verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimize(source, source.with_name("out.onnx"), external_data="out.data")
    assert sorted(p.name for p in source.parent.iterdir()) == ["model.onnx", "weights.bin"]


def test_without_a_runtime_the_output_is_not_verified(source: Path, no_onnxruntime: None) -> None:
    output = source.with_name("out.onnx")
    report = optimize(source, output)
    assert _fused_nodes(output)
    assert report.verification is None
    assert report.warnings == ("not verified: no ONNX Runtime is installed: install ort-moe[cpu] or ort-moe[gpu]",)
    assert "warning: not verified" in str(report)


def test_with_an_old_runtime_the_output_is_not_verified(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    report = optimize(source, source.with_name("out.onnx"))
    assert "not verified: ONNX Runtime 1.26.0 is too old: 1.27 or newer is needed" in report.warnings[0]


def test_verification_can_be_switched_off(source: Path) -> None:
    report = optimize(source, source.with_name("out.onnx"), verify=False)
    assert report.verification is None
    assert report.warnings == ("not verified: switched off",)


def test_input_in_place_needs_force(source: Path) -> None:
    with pytest.raises(OutputError, match="it is the input"):
        optimize(source, source)
    assert not _fused_nodes(source)
    optimize(source, source, force=True)
    assert _fused_nodes(source)


def test_what_exists_is_replaced_by_force_alone(source: Path) -> None:
    """A model, the file that all weights shall go to, or a link to nowhere; told before anything is rewritten."""
    output, data, link = (source.with_name(name) for name in ("out.onnx", "all.bin", "link.onnx"))
    output.write_bytes(b"the model of yesterday")
    link.symlink_to("nowhere")
    for path in (output, link):
        with pytest.raises(OutputError, match=f"^cannot write {path}: it exists; .*use --force to replace it$"):
            optimize(source, path)
    assert output.read_bytes() == b"the model of yesterday"
    output.unlink()
    data.write_bytes(b"the weights of another model")
    with pytest.raises(OutputError, match=r"all\.bin: it exists and may belong to another model.*use --force to repl"):
        optimize(source, output, external_data="all.bin")
    assert data.read_bytes() == b"the weights of another model"
    optimize(source, output, external_data="all.bin", force=True)
    optimize(source, link, force=True)
    assert _fused_nodes(output)
    assert not link.is_symlink()


def test_rules_and_skip(source: Path) -> None:
    assert not optimize(source, skip=("seed-topk",)).matched
    with pytest.raises(ValueError, match="no-such-rule"):
        optimize(source, rules=("no-such-rule",))


def test_unknown_target(source: Path) -> None:
    with pytest.raises(ValueError, match="target 'tpu' is unknown; there are cuda, cpu, contrib"):
        optimize(source, target="tpu")  # type: ignore[arg-type]


def test_old_opset_is_told(tmp_path: Path) -> None:
    model = original()
    model.opset_import[0].version = 11
    with pytest.raises(ModelError, match="11"):
        optimize(save(model, tmp_path / "model.onnx"))


def test_report_is_json_of_the_documented_keys(source: Path) -> None:
    document = optimize(source, source.with_name("out.onnx")).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document) == {
        *("schema", "source", "output", "target", "matched", "already_fused", "operators", "passes", "sites"),
        *("experts", "conversions", "findings", "verification", "warnings"),
    }
    assert document["schema"] == 5
    assert document["operators"]["TopK"] == {"before": 1, "after": 0}
    assert document["operators"]["ort_moe::FusedRouter"] == {"before": 0, "after": 1}
    assert document["sites"][0]["status"] == "whole"
    assert document["sites"][0]["attributes"]["group_fill"] == "-inf"
    assert all(set(record) == {"name", "applied", "seconds"} for record in document["passes"])
    assert document["verification"]["passed"] is True


def test_report_prints_operators_and_passes(source: Path) -> None:
    report = optimize(source, source.with_name("out.onnx"))
    text = str(report)
    assert "1 router fused whole" in text
    assert "ort_moe::FusedRouter +1" in text
    assert text.splitlines()[-1].startswith("written: ")
    in_full = str(report.in_full)
    assert "all, idle ones too" in in_full
    assert in_full.splitlines()[-1].startswith("written: ")


def test_weights_are_not_read(tmp_path: Path) -> None:
    """A model with 64 GiB of weights (a file of one hole) takes no more memory than a small one."""
    model, hidden = original(), 32768
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, dims in (("expert_matrices", [16, hidden, hidden]), ("router_matrix", [hidden, 16])):
        tensors[name].dims[:] = dims
        onnx.external_data_helper.set_external_data(tensors[name], "weights.bin", 0, 4 * math.prod(dims))
        tensors[name].ClearField("raw_data")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[1].dim_value = hidden
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(4 * 16 * hidden * hidden)
    source = tmp_path / "model.onnx"
    source.write_bytes(model.SerializeToString())
    code = (
        "import resource, ort_moe, sys\n"
        "ort_moe.optimize(sys.argv[1], sys.argv[2], verify=False)\n"
        "assert ort_moe.inspect(sys.argv[2]).layers[0].kind == 'fused router'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    output = tmp_path / "out.onnx"
    done = subprocess.run(
        [sys.executable, "-c", code, source, output], capture_output=True, text=True, check=True, env=os.environ
    )
    assert int(done.stdout) < 1 << 20  # KiB: one GiB
    assert _fused_nodes(output)
    assert output.stat().st_size < 100_000
