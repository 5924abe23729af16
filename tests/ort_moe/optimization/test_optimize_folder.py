"""`optimize` of a model folder: what is written anew, what is carried over, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from ort_moe.errors import EnvironmentUnfitError, ModelError, OutputError, VerificationError
from ort_moe.installation.library import NAME, library_path
from ort_moe.optimization.folder_report import FolderReport
from ort_moe.optimization.optimize import optimize
from ort_moe.running.session import session
from ort_moe.verification import SiteCheck, Verification
from tests.genai_folders import config, contents, genai_folder
from tests.ort_moe.published_schemas import check
from tests.ort_moe.tiny_models import fused, original, save

CARRIED = {"tokenizer.json", "adapters/one.onnx_adapter"}


def classifier() -> onnx.ModelProto:
    """A model without a router."""
    model = original()
    del model.graph.node[3:]
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("ids", TensorProto.INT64, None))
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return genai_folder(tmp_path / "in")


def _optimize(*arguments: Any, **options: Any) -> FolderReport:
    report = optimize(*arguments, **options)
    assert isinstance(report, FolderReport)
    return report


def _library_of(folder: Path) -> str | None:
    document = json.loads((folder / "genai_config.json").read_text())
    options: dict[str, str] = document["model"]["decoder"].get("session_options", {})
    return options.get("custom_ops_library")


def _fused_nodes(path: Path) -> int:
    return sum(node.op_type == "FusedRouter" for node in onnx.load(path, load_external_data=False).graph.node)


def test_folder(source: Path) -> None:
    before, output = contents(source), source.with_name("out")
    report = _optimize(source, output)
    assert contents(source) == before
    after = contents(output)
    assert set(after) == {*before, NAME}
    assert {name for name in after if before.get(name) == after[name]} == {*CARRIED, "model.onnx.data"}
    assert after[NAME] == library_path().read_bytes()
    assert _library_of(output) == NAME
    assert _fused_nodes(output / "model.onnx") == 1
    session(output / "model.onnx", providers=["CPUExecutionProvider"])
    (model,) = report.models
    assert report.matched
    assert model.verification is not None
    assert model.verification.passed
    assert (report.output, report.library, report.carried, report.target) == (str(output), NAME, 2, "cpu")
    assert model.output == str(output / "model.onnx")
    check("folder", report.to_dict())
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


def test_a_model_of_two_names(tmp_path: Path) -> None:
    document = config(filename="./model.onnx")
    document["model"]["vision"] = {"filename": "model.onnx", "session_options": {}}
    source, output = genai_folder(tmp_path / "in", document), tmp_path / "out"
    assert [Path(model.source).name for model in _optimize(source, output).models] == ["model.onnx"]
    assert set(contents(output)) == {*contents(source), NAME}
    written = json.loads((output / "genai_config.json").read_text())["model"]
    assert [written[part]["filename"] for part in ("decoder", "vision")] == ["./model.onnx", "model.onnx"]
    assert [written[part]["session_options"]["custom_ops_library"] for part in ("decoder", "vision")] == [NAME, NAME]


def test_what_is_told(source: Path) -> None:
    report = _optimize(source, source.with_name("out"))
    lines = str(report).splitlines()
    assert lines[0] == f"{source}/model.onnx: 1 router fused whole, without experts"
    assert lines[-2:] == [
        f"for cpu: custom ops by {NAME} in the folder, 2 files carried over",
        f"written: {source.with_name('out')}",
    ]
    for expected in ("site 0: choice", "by the rules: softmax", "all nodes", "PASSED", *lines[-2:]):
        assert expected in str(report.in_full)


def test_the_folder_moves(source: Path, tmp_path: Path) -> None:
    _optimize(source, tmp_path / "out")
    shutil.rmtree(source)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert _optimize(moved, None).models[0].already_fused == 1


def test_dry_run(source: Path) -> None:
    before = contents(source)
    report = _optimize(source)
    assert report.matched
    assert (report.output, report.library, report.carried) == (None, None, 0)
    assert str(report).splitlines()[-1] == "nothing written"
    assert contents(source) == before
    check("folder", report.to_dict())


def test_target_by_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ort_moe.optimization.optimize_folder.build_info", lambda: {"cuda": None})
    options = {"provider_options": [{"cuda": {"enable_cuda_graph": "1"}}]}
    source = genai_folder(tmp_path / "in", config(session_options=options))
    report = _optimize(source)
    assert report.target == "cuda"
    assert "asks for cuda, for which the library of this installation has no kernels" in str(report)
    assert _optimize(source, target="contrib").target == "contrib"
    monkeypatch.setattr("ort_moe.optimization.optimize_folder.build_info", lambda: {"cuda": {}})
    assert not _optimize(source).warnings


def test_strange_providers(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in", config(session_options={"provider_options": [{"WebGPU": {}}]}))
    assert "asks for WebGPU, for which there are no kernels: fused nodes run on the CPU" in str(_optimize(source))
    (source / "model.onnx").unlink()
    save(classifier(), source / "model.onnx")
    assert not _optimize(source).warnings


def test_nothing_matches(tmp_path: Path) -> None:
    """The output is the input, byte for byte."""
    source = genai_folder(tmp_path / "in", models={"model.onnx": classifier()})
    report = _optimize(source, tmp_path / "out")
    assert not report.matched
    assert report.library is None
    assert contents(tmp_path / "out") == contents(source)
    assert report.carried == len(contents(source))
    check("folder", report.to_dict())


def test_nothing_matches_and_nothing_is_written(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in", models={"model.onnx": classifier()})
    assert _optimize(source, tmp_path / "out", require_match=True).output is None
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_contrib_needs_no_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_MOE_LIBRARY", "/nowhere")
    report = _optimize(source, source.with_name("out"), target="contrib")
    assert report.library is None
    assert contents(source.with_name("out")) == contents(source)


def test_without_a_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_MOE_LIBRARY", "/nowhere")
    with pytest.raises(EnvironmentUnfitError, match="there is no file /nowhere"):
        _optimize(source, source.with_name("out"))
    assert [path.name for path in source.parent.iterdir()] == ["in"]


def test_an_optimised_folder(source: Path, tmp_path: Path) -> None:
    """Once more: its library is renewed, all else is carried over."""
    _optimize(source, tmp_path / "out")
    (tmp_path / "out" / NAME).write_bytes(b"old")
    report = _optimize(tmp_path / "out", tmp_path / "again")
    assert not report.matched
    assert report.library == NAME
    after = contents(tmp_path / "again")
    assert after.pop(NAME) == library_path().read_bytes()
    assert after == {name: data for name, data in contents(tmp_path / "out").items() if name != NAME}


def test_a_model_optimised_by_itself_gets_its_library(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in", models={"model.onnx": fused()})
    assert not _optimize(source, tmp_path / "out").matched
    assert _library_of(tmp_path / "out") == NAME


def test_several_models(tmp_path: Path) -> None:
    """In a folder of its own each, or beside each other, one of them without routers."""
    document = config(filename="decoder/model.onnx")
    document["model"]["embedding"] = {"filename": "embedding.onnx"}
    document["model"]["vision"] = {"filename": "vision.onnx", "session_options": {}}
    models = {"decoder/model.onnx": original(), "embedding.onnx": classifier(), "vision.onnx": original()}
    source = genai_folder(tmp_path / "in", document, models)
    report = _optimize(source, tmp_path / "out")
    assert [model.matched for model in report.models] == [True, False, True]
    before, after = contents(source), contents(tmp_path / "out")
    assert set(after) == {*before, NAME}
    assert after["embedding.onnx"] == before["embedding.onnx"]
    written = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert written["model"]["vision"]["session_options"] == {"custom_ops_library": NAME}
    assert _library_of(tmp_path / "out") == NAME


def test_one_file_for_weights(source: Path) -> None:
    """Weights that no model reads any more are left behind; what is somebody else's is not overwritten."""
    output = source.with_name("out")
    _optimize(source, output, external_data="weights.bin")
    assert set(contents(output)) == {*CARRIED, "genai_config.json", "model.onnx", "weights.bin", NAME}
    for name, sentence in (
        ("tokenizer.json", "tokenizer.json: the input has a file of that name"),
        ("genai_config.json", "another file has that name"),
        (NAME, "another file has that name"),
    ):
        with pytest.raises(OutputError, match=sentence):
            _optimize(source, source.with_name("other"), external_data=name)
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


def test_one_file_for_two_models(tmp_path: Path) -> None:
    document = config(filename="model.onnx")
    document["model"]["vision"] = {"filename": "vision.onnx"}
    source = genai_folder(tmp_path / "in", document, {"model.onnx": original(), "vision.onnx": original()})
    with pytest.raises(OutputError, match=r"weights of 2 models to one file 'weights\.bin'"):
        _optimize(source, tmp_path / "out", external_data="weights.bin")
    assert not (tmp_path / "out").exists()


def test_packed_weights(tmp_path: Path) -> None:
    import models.fixtures

    model = onnx.load(models.fixtures.get("mixtral_block_dynamo_fp32").path)
    document = config(filename="model.onnx")
    document["model"]["vision"] = {"filename": "vision.onnx"}
    source = genai_folder(tmp_path / "in", document, {"model.onnx": model, "vision.onnx": classifier()})
    report = _optimize(source, tmp_path / "out", weights="int8", block_size=16)
    assert [bool(each.conversions) for each in report.models] == [True, False]
    assert "no weights packed" not in str(report)
    session(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])


def test_existing_output(source: Path) -> None:
    output = source.with_name("out")
    _optimize(source, output)
    (output / "note").touch()
    with pytest.raises(OutputError, match="it exists; name another output, or use --force to replace it"):
        _optimize(source, output)
    assert (output / "note").exists()
    _optimize(source, output, force=True)
    assert not (output / "note").exists()
    (output / "genai_config.json").unlink()
    with pytest.raises(OutputError, match="it exists and is no model folder"):
        _optimize(source, output, force=True)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (lambda source: source, "it is the input, and a folder is never changed in place"),
        (lambda source: source / "adapters" / "out", "it lies in the input"),
        (lambda source: source.parent, "the input lies in it"),
        (lambda source: source.parent / "missing" / "out", "there is no folder"),
    ],
)
def test_places_where_nothing_is_put(source: Path, output: Callable[[Path], Path], sentence: str) -> None:
    before = contents(source)
    with pytest.raises(OutputError, match=sentence):
        _optimize(source, output(source), force=True)
    assert contents(source) == before


def test_failed_verification(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SiteCheck("choice", "failed", detail="weights differ")
    monkeypatch.setattr("ort_moe.verification.verify", lambda *_: Verification("a", "b", (site,), (), 1e-4))
    with pytest.raises(VerificationError, match="nothing was put in place"):
        _optimize(source, source.with_name("out"))
    assert [path.name for path in source.parent.iterdir()] == ["in"]
    assert _optimize(source, source.with_name("out"), verify=False).models[0].warnings == (
        "not verified: switched off",
    )


def test_another_library(tmp_path: Path) -> None:
    source = genai_folder(tmp_path / "in", config(session_options={"custom_ops_library": "libtheirs.so"}))
    with pytest.raises(ModelError, match=r"registers the library 'libtheirs\.so'"):
        _optimize(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_model_that_is_not_there(source: Path) -> None:
    (source / "model.onnx").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model\.onnx"):
        _optimize(source, source.with_name("out"))
    assert [path.name for path in source.parent.iterdir()] == ["in"]


def test_what_cannot_be_carried_over(source: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(ModelError, match="pipe: it is no regular file"):
        _optimize(source)


def test_links_become_files(source: Path, tmp_path: Path) -> None:
    """As in the cache of a hub, where the files of a model lie elsewhere."""
    (tmp_path / "blobs").mkdir()
    (source / "tokenizer.json").rename(tmp_path / "blobs" / "1")
    (source / "tokenizer.json").symlink_to("../blobs/1")
    _optimize(source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert contents(tmp_path / "out")["tokenizer.json"] == (tmp_path / "blobs" / "1").read_bytes()


def test_weights_behind_links_are_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (source / "model.onnx.data").rename(tmp_path / "blobs" / "1")
    (source / "model.onnx.data").symlink_to("../blobs/1")
    with pytest.raises(ModelError, match=r"is a link to another folder, .* with `cp -L`"):
        _optimize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_model_folder(tmp_path: Path) -> None:
    save(original(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"it has no genai_config\.json; for one model, name its file"):
        optimize(tmp_path, tmp_path / "out")


def test_unknown_settings(source: Path) -> None:
    with pytest.raises(ValueError, match="target 'tpu' is unknown"):
        optimize(source, target="tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no-such-rule"):
        optimize(source, rules=("no-such-rule",))
