"""A folder stands for the one model in it, or the file to name is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ort_moe import ModelError, OutputError, bench, explain, export, inspect, optimize, session, verify
from ort_moe.files.model_path import model_file
from ort_moe.running.session import ON_CPU
from tests.genai_folders import config, genai_folder
from tests.ort_moe.tiny_models import fused, original, save


def test_files_are_themselves(tmp_path: Path) -> None:
    assert model_file("models/../decode.onnx") == "models/../decode.onnx"
    assert model_file(tmp_path / "missing") == tmp_path / "missing"


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    folder = genai_folder(tmp_path / "genai")
    save(original(), folder / "other.onnx")  # which the configuration does not name
    assert model_file(folder) == folder / "model.onnx"
    (folder / "genai_config.json").unlink()
    (folder / "model.onnx").unlink()
    assert model_file(str(folder)) == folder / "other.onnx"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            ["decode.onnx", "prefill.onnx", "config.json"],
            "is a folder of 2 models: name the file of one, decode.onnx, ",
        ),
        ([f"{n}.onnx" for n in range(7)], "7 models: name the file of one, 0.onnx, 1.onnx, 2.onnx, 3.onnx or 3 more$"),
        (["config.json", "model.safetensors"], "as of a model that is yet to be exported: `ort-moe export` does that"),
        (["manifest.json"], "of a model package, name the folder of one variant"),
        ([], "it has no genai_config.json, and no ONNX model$"),
    ],
)
def test_which_file_to_give(tmp_path: Path, files: list[str], told: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    for look in (inspect, explain, session, bench, lambda folder: verify(folder, folder)):
        with pytest.raises(ModelError, match=told):
            look(tmp_path)


def test_several_models_of_a_configuration(tmp_path: Path) -> None:
    document = config()
    document["model"]["vision"] = {"filename": "vision.onnx"}
    folder = genai_folder(tmp_path / "genai", document)
    with pytest.raises(ModelError, match=r"2 models: name the file of one, model\.onnx, vision\.onnx$"):
        model_file(folder)
    (folder / "genai_config.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(ModelError, match="names no decoder"):
        model_file(folder)


@pytest.mark.usefixtures("in_this_process")
def test_what_takes_a_folder(tmp_path: Path) -> None:
    given, made = genai_folder(tmp_path / "given"), genai_folder(tmp_path / "made", models={"model.onnx": fused()})
    path = str(given / "model.onnx")
    assert inspect(given).model == path
    assert len(explain(given).sites) == 1
    assert session(made, ON_CPU).get_inputs()[0].name == session(path, ON_CPU).get_inputs()[0].name
    verification = verify(given, made)
    assert verification.passed
    assert (verification.reference, verification.optimized) == (path, str(made / "model.onnx"))
    result = bench(given, made, providers=ON_CPU, tokens=(1,), steps=1)
    assert result.source == path
    assert [variant.model for variant in result.variants] == [path, None, str(made / "model.onnx")]
    assert result.measured


NOT_UTF8 = os.fsdecode(b"\xfe")
"""A name that a file can have."""


@pytest.mark.parametrize("verified", [False, True])
def test_no_output_that_onnxruntime_does_not_open(tmp_path: Path, verified: bool) -> None:
    model, folder = save(original(), tmp_path / "in.onnx"), genai_folder(tmp_path / "genai")
    for call in (
        lambda: optimize(model, tmp_path / f"{NOT_UTF8}.onnx", verify=verified),
        lambda: optimize(model, tmp_path / "out.onnx", external_data=NOT_UTF8, verify=verified),
        lambda: optimize(folder, tmp_path / NOT_UTF8, verify=verified),
        lambda: export(folder, tmp_path / NOT_UTF8, verify=verified),
    ):
        with pytest.raises(OutputError, match=f"^cannot write {tmp_path}/{NOT_UTF8}.*: this is not UTF-8, and ONNX "):
            call()
    assert {path.name for path in tmp_path.iterdir()} == {"in.onnx", "genai"}


def test_no_input_that_onnxruntime_does_not_open(tmp_path: Path) -> None:
    (tmp_path / NOT_UTF8).mkdir()
    model = save(original(), tmp_path / NOT_UTF8 / "in.onnx")
    with pytest.raises(ModelError, match=f"^ONNX Runtime does not take {model}: its name is not UTF-8$"):
        session(model, ON_CPU)
    with pytest.raises(ModelError, match=f"cannot load {model}: the name of the folder of its weights is not UTF-8"):
        verify(model, save(fused(), tmp_path / "out.onnx"))
