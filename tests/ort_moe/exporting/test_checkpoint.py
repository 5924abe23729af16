"""What is told of a folder before PyTorch is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ort_moe.errors import ModelError
from ort_moe.exporting.checkpoint import Checkpoint
from tests.ort_moe.exporting.folders import model_folder, safetensors, sharded_folder
from tests.unreadable import refuse_to_open


def test_one_file_of_weights(tmp_path: Path) -> None:
    checkpoint = Checkpoint.of(model_folder(tmp_path))
    assert checkpoint.model_type == "mixtral"
    assert [path.name for path in checkpoint.weights] == ["model.safetensors"]


def test_several_files_of_weights(tmp_path: Path) -> None:
    checkpoint = Checkpoint.of(sharded_folder(tmp_path))
    assert [path.name[:11] for path in checkpoint.weights] == ["model-00001", "model-00002"]


def test_numbers_in_the_files(tmp_path: Path) -> None:
    assert Checkpoint.of(model_folder(tmp_path)).numbers == 4
    assert Checkpoint.of(model_folder(tmp_path, quantization_config={"quant_method": "mxfp4"})).numbers == 8
    assert Checkpoint.of(sharded_folder(tmp_path)).numbers == 8
    for path in tmp_path.glob("model*"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(11))
    assert Checkpoint.of(tmp_path).numbers == 11


def test_carried(tmp_path: Path) -> None:
    sharded_folder(tmp_path)
    along = ["LICENSE", "chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer.model"]
    for name in [*along, "README.md", "modeling_mine.py", "training_args.bin"]:
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes.txt").symlink_to("README.md")
    along += ["config.json", "notes.txt"]
    assert [path.name for path in Checkpoint.of(tmp_path).carried] == sorted(along)


def _index(folder: Path, text: str) -> None:
    sharded_folder(folder)
    (folder / "model.safetensors.index.json").write_text(text)


def _without_shards(folder: Path) -> None:
    for path in sharded_folder(folder).glob("*.safetensors"):
        path.unlink()


def _cut(folder: Path) -> None:
    model_folder(folder)
    (folder / "model.safetensors").write_bytes(safetensors(8)[:-3])


def _pointer(folder: Path) -> None:
    model_folder(folder)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _link_to_nothing(folder: Path) -> None:
    (model_folder(folder) / "tokenizer.json").symlink_to("blobs/tokenizer.json")


def _no_header(folder: Path) -> None:
    model_folder(folder)
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"text" + bytes(8))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: None, "is no Hugging Face model folder: there is no config.json in it"),
    "genai": (lambda folder: (folder / "genai_config.json").write_text("{}"), "`ort-moe optimize` takes"),
    "config no json": (lambda folder: (folder / "config.json").write_text("model_type: x"), "config.json is no JSON"),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), "'model_type' is expected"),
    "config nested": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "is nested too deep"),
    "no model type": (lambda folder: (folder / "config.json").write_text("{}"), "'model_type' is expected"),
    "no weights": (
        lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": "mixtral"})),
        "holds no weights: model.safetensors or pytorch_model.bin is expected",
    ),
    "shards missing": (
        _without_shards,
        "names model-00001-of-00002.safetensors, which is not there (and 1 more file)",
    ),
    "index broken": (lambda folder: _index(folder, "{}"), "'weight_map' is expected"),
    "index nested": (lambda folder: _index(folder, "[" * 100_000), "'weight_map' is expected"),
    "cut short": (_cut, "is cut short or damaged: it should have"),
    "pointer": (_pointer, "fetch them with `git lfs pull`"),
    "tokenizer missing": (_link_to_nothing, "tokenizer.json: it is a link to a file that is not there"),
    "no header": (_no_header, "is not in the format safetensors"),
    "quantized": (
        lambda folder: model_folder(folder, quantization_config={"quant_method": "gptq"}),
        "its weights are quantized (gptq), and only mxfp4 and fp8 can be undone",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_folder_is_one_sentence(tmp_path: Path, kind: str) -> None:
    make, sentence = BAD[kind]
    make(tmp_path)
    with pytest.raises(ModelError) as refused:
        Checkpoint.of(tmp_path)
    assert sentence in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    refuse_to_open(monkeypatch, model_folder(tmp_path) / name)
    with pytest.raises(ModelError, match=f"^cannot read {tmp_path / name}: Permission denied$"):
        Checkpoint.of(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        Checkpoint.of(tmp_path / "absent")
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file: a Hugging Face model folder is expected"):
        Checkpoint.of(tmp_path / "model.onnx")
