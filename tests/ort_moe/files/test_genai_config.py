"""genai_config.json: which models it names, where they run, and how our library gets into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ort_moe.errors import ModelError
from ort_moe.files.genai_config import GenaiConfig, read_config
from tests.genai_folders import config

LIBRARY = "libort_moe.so"


def _read(folder: Path, document: Any, **formatting: Any) -> GenaiConfig:
    text = document if isinstance(document, str) else json.dumps(document, **{"indent": 4, **formatting})
    (folder / "genai_config.json").write_text(text, encoding="utf-8")
    return read_config(folder)


def _library_of(options: dict[str, Any]) -> str | None:
    return options.get("custom_ops_library")


def test_decoder(tmp_path: Path) -> None:
    read = _read(tmp_path, config())
    assert read.models == ("model.onnx",)
    assert read.providers == ()
    assert read.target == "cpu"


@pytest.mark.parametrize(
    ("listed", "target", "strange"),
    [
        ([{"cuda": {"enable_cuda_graph": "1"}}], "cuda", ()),
        ([{"CUDAExecutionProvider": {}}], "cuda", ()),
        ([{"cpu": {}}], "cpu", ()),
        ([{"dml": {}}], "cpu", ("dml",)),
        ([{"WebGPU": {}}, {"cuda": {}}], "cuda", ("WebGPU",)),
    ],
)
def test_providers(tmp_path: Path, listed: list[Any], target: str, strange: tuple[str, ...]) -> None:
    read = _read(tmp_path, config(session_options={"provider_options": listed}))
    assert (read.target, read.strange_providers) == (target, strange)


def test_one_line_is_added(tmp_path: Path) -> None:
    document = config()
    document["model"]["greeting"] = "h\u00e9"
    read = _read(tmp_path, document, ensure_ascii=False)
    text = read.with_library(LIBRARY, ["model.onnx"])
    lines, before = text.splitlines(), read.text.splitlines()
    (added,) = [line for line in lines if line not in before and line != f"{before[7]},"]
    assert added.strip() == f'"custom_ops_library": "{LIBRARY}"'
    assert len(lines) == len(before) + 1
    assert _read(tmp_path, text).with_library(LIBRARY, ["model.onnx"]) == text


@pytest.mark.parametrize("indent", [None, 2, "\t"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_format_is_kept(tmp_path: Path, indent: Any, end: str) -> None:
    text = json.dumps(config(), indent=indent) + end
    changed = _read(tmp_path, text).with_library(LIBRARY, ["model.onnx"])
    assert changed == json.dumps(json.loads(changed), indent=indent) + end


def test_nothing_changes_for_no_model(tmp_path: Path) -> None:
    read = _read(tmp_path, config(), separators=(" ,", " : "))
    assert read.with_library(LIBRARY, []) == read.text


def test_other_components(tmp_path: Path) -> None:
    """Those with options of their own get the library there, others by the decoder's."""
    document = config()
    document["model"]["embedding"] = {"filename": "embedding.onnx", "config_filename": "other.json"}
    document["model"]["vision"] = {"filename": "vision.onnx", "session_options": {"log_id": "v"}}
    read = _read(tmp_path, document)
    assert read.models == ("model.onnx", "embedding.onnx", "vision.onnx")
    for model, places in (("embedding.onnx", ["decoder"]), ("vision.onnx", ["vision"])):
        sections = json.loads(read.with_library(LIBRARY, [model]))["model"]
        assert [name for name in ("decoder", "vision") if _library_of(sections[name]["session_options"])] == places


def test_pipeline(tmp_path: Path) -> None:
    pipeline = [
        {"prompt": {"filename": "prompt.onnx", "session_options": {"log_id": "p"}}, "token": {"filename": "token.onnx"}}
    ]
    document = config(pipeline=pipeline)
    del document["model"]["decoder"]["filename"], document["model"]["decoder"]["session_options"]
    read = _read(tmp_path, document)
    assert read.models == ("prompt.onnx", "token.onnx")
    decoder = json.loads(read.with_library(LIBRARY, read.models))["model"]["decoder"]
    assert _library_of(decoder["session_options"]) == LIBRARY
    assert _library_of(decoder["pipeline"][0]["prompt"]["session_options"]) == LIBRARY


def test_our_library_is_named_already(tmp_path: Path) -> None:
    options = {"provider_options": [], "custom_ops_library": f"/opt/{LIBRARY}"}
    text = _read(tmp_path, config(session_options=options)).with_library(LIBRARY, ["model.onnx"])
    assert _library_of(json.loads(text)["model"]["decoder"]["session_options"]) == LIBRARY


@pytest.mark.parametrize("none", [None, ""])
def test_a_key_without_a_library_gets_ours(tmp_path: Path, none: str | None) -> None:
    read = _read(tmp_path, config(session_options={"custom_ops_library": none}))
    assert read.with_library(LIBRARY, []) == read.text
    document = json.loads(read.with_library(LIBRARY, ["model.onnx"]))
    assert _library_of(document["model"]["decoder"]["session_options"]) == LIBRARY


def test_another_library_stays(tmp_path: Path) -> None:
    read = _read(tmp_path, config(session_options={"custom_ops_library": "libtheirs.so"}))
    assert read.with_library(LIBRARY, []) == read.text
    with pytest.raises(ModelError, match=r"the library 'libtheirs\.so' of other custom ops, .* takes but one"):
        read.with_library(LIBRARY, ["model.onnx"])


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("{", "is not JSON: .* at line 1"),
        ("[" * 100_000, "it is nested too deep"),
        ({"x": "\ud83d\ude00\ud800", **config()}, r"has the escape \\ud800, half of a surrogate pair"),
        ({"\udfff": 1, **config()}, r"has the escape \\udfff, half of a surrogate pair"),
        (config(filename="\ud800.onnx"), r"has the escape \\ud800, half of a surrogate pair"),
        ('{"x": 1e999}', "has the number 1e999, which neither JSON nor a float64 can hold"),
        ('{"x": [-Infinity]}', "has the number -Infinity, which"),
        ('{"x": NaN}', "has the number NaN, which"),
        ('{"x": ' + "9" * 5000 + "}", r"has the number 9{20}\.\.\. of 5000 characters, which"),
        ('{"x": ' + "9" * 400 + "}", r"has the number 9{20}\.\.\. of 400 characters, which"),
        ([], "it has no section 'model'"),
        ({"model": []}, "it has no section 'model'"),
        ({"model": {"encoder": {}, "type": "x"}}, "names no decoder: .* its parts are 'encoder'"),
        ({"model": {}}, "names no decoder: .* its parts are none"),
        ({"model": {"decoder": {"filename": 3}}}, "the decoder names no ONNX model"),
        ({"model": {"decoder": {"filename": "model.xml"}}}, "the decoder names no ONNX model"),
        (config(filename="\0.onnx"), r"names the model '\\x00\.onnx', which no file can be called"),
        (config(filename="../model.onnx"), r"names the model '\.\./model.onnx', which lies outside its folder"),
        (config(filename="/model.onnx"), "names the model '/model.onnx', which lies outside its folder"),
        (config(session_options=[]), "the decoder's session_options are not such as"),
        (config(session_options={"provider_options": ["cuda"]}), "the decoder's session_options are not such as"),
        ({"version": 2, **config()}, "has the version 2, and this ort-moe knows configurations of version 1"),
        ({"schema_version": "v3", **config()}, "has the schema_version 'v3'"),
        ({"model": {**config()["model"], "config_version": 9}}, "has the config_version 9"),
    ],
)
def test_bad_configurations(tmp_path: Path, document: Any, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as raised:
        _read(tmp_path, document)
    assert str(tmp_path / "genai_config.json") in str(raised.value)


def test_known_versions(tmp_path: Path) -> None:
    for version in (1, "1", "1.0", 1.0):
        assert _read(tmp_path, {"version": version, **config()}).models


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_bytes(b'{"model": "\xff"}')
    with pytest.raises(ModelError, match=r"is not text in UTF-8: .* at byte 11"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (None, "it has no genai_config.json, and no ONNX model$"),
        ("decoder.onnx", "for one model, name its file, such as .*decoder.onnx"),
        ("manifest.json", "but a manifest.json: of a model package, name the folder of one variant"),
        ("config.json", "but a config.json, as of a model that is yet to be exported"),
    ],
)
def test_no_model_folder(tmp_path: Path, name: str | None, sentence: str) -> None:
    if name is not None:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=f"is no model folder of onnxruntime-genai: {'.*' if name else ''}{sentence}"):
        read_config(tmp_path)
