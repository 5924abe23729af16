"""Reading a model, and what is told of a broken one."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from ort_moe.errors import ModelError
from ort_moe.files.loading import check_data_readable, data_files, load_model
from ort_moe.ops import DOMAIN
from tests.ort_moe.tiny_models import fused, original, save
from tests.unreadable import refuse_to_open


def test_external_data_stays_on_disk(source: Path) -> None:
    value = load_model(source).graph.initializers["expert_matrices"].const_value
    assert isinstance(value, ir.ExternalTensor)
    assert value.raw is None  # not even mapped


def test_relative_path(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    assert data_files(load_model("model.onnx")) == {"weights.bin": source.parent / "weights.bin"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an ONNX model: the file is empty"),
        (b"<html>no model</html>", "not an ONNX model: it cannot be parsed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\x08\x0a", "not an ONNX model: it holds no graph"),
    ],
)
def test_no_model(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*absent\.onnx: No such file"):
        load_model(tmp_path / "absent.onnx")


@pytest.mark.parametrize("name", ["\0.onnx", "\ud800.onnx"])
def test_name_that_no_file_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"cannot read '.*\\.*\.onnx': no file can be called so"):
        load_model(tmp_path / name)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Is a directory"):
        load_model(tmp_path)


def test_truncated(tmp_path: Path) -> None:
    path = save(original(), tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut short or damaged"):
        load_model(path)


def test_missing_external_data(source: Path) -> None:
    (source.parent / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"external data 'weights\.bin' is missing, with \d+ tensors in it: "):
        load_model(source)


def test_external_data_that_cannot_be_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = load_model(source), source.parent / "weights.bin"
    check_data_readable(source, model)
    refuse_to_open(monkeypatch, data)
    with pytest.raises(ModelError, match=f"^cannot read {data}: Permission denied$"):
        check_data_readable(source, model)


def test_truncated_external_data(source: Path) -> None:
    data = source.parent / "weights.bin"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"'weights\.bin' is cut short: tensor '.*' ends at byte \d+"):
        load_model(source)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "offset",
            "-4096",
            r"the offset of tensor '\w+' in external data is '-4096', expected is a number of bytes",
        ),
        ("length", "many", r"the length of tensor '\w+' in external data is 'many', expected is a number of bytes"),
        ("length", "12", r"tensor '\w+' has \d+ bytes, but 12 in external data 'weights\.bin'"),
    ],
)
def test_place_in_external_data(source: Path, key: str, value: str, message: str) -> None:
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=message):
        load_model(source)


def test_external_data_outside(source: Path) -> None:
    model = onnx.load(source, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.bin"
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="outside the model's folder"):
        load_model(source)


@pytest.mark.parametrize("where", ["initializer", "constant", "branch"])
def test_sparse_tensors(tmp_path: Path, where: str) -> None:
    model = original()
    sparse = onnx.helper.make_sparse_tensor(
        onnx.helper.make_tensor("sparse", onnx.TensorProto.FLOAT, [1], [2.0]),
        onnx.helper.make_tensor("places", onnx.TensorProto.INT64, [1], [1]),
        [4],
    )
    constant = onnx.helper.make_node("Constant", [], ["sparse"], sparse_value=sparse)
    if where == "initializer":
        model.graph.sparse_initializer.append(sparse)
    elif where == "constant":
        model.graph.node.append(constant)
    else:
        branch = onnx.helper.make_graph([constant], "branch", [], [])
        model.graph.node.append(onnx.helper.make_node("If", ["c"], [], then_branch=branch, else_branch=branch))
    with pytest.raises(ModelError, match="holds sparse tensors, which ort-moe cannot read"):
        load_model(save(model, tmp_path / "model.onnx"))


def test_model_that_makes_no_sense(tmp_path: Path) -> None:
    model = original()
    model.graph.node.append(onnx.helper.make_node("Neg", ["hidden"], ["output"]))
    with pytest.raises(ModelError, match="is not a valid ONNX model: Output 'output' is redeclared") as caught:
        load_model(save(model, tmp_path / "model.onnx"))
    assert "\n" not in str(caught.value)


def test_no_regular_file(tmp_path: Path) -> None:
    pipe = tmp_path / "model.onnx"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ModelError, match=f"cannot read {path}: it is no regular file"):
            load_model(path)


@pytest.mark.parametrize(
    ("ir_version", "opset", "message"),
    [
        (
            99,
            18,
            r"has IR version 99 and opset 18, which ONNX Runtime \S+ cannot load: Unsupported model IR version",
        ),
        (10, 999, r"has IR version 10 and opset 999, which ONNX Runtime \S+ cannot load: .*Opset 999"),
    ],
)
def test_unknown_versions(tmp_path: Path, ir_version: int, opset: int, message: str) -> None:
    model = original()
    model.ir_version = ir_version
    model.opset_import[0].version = opset
    with pytest.raises(ModelError, match=message) as caught:
        load_model(save(model, tmp_path / "model.onnx"))
    assert "onnxruntime_src" not in str(caught.value)


def test_unknown_versions_without_a_runtime(tmp_path: Path, no_onnxruntime: None) -> None:
    model = original()
    model.opset_import[0].version = 999
    path = save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="newer than the installed onnx"):
        load_model(path)


def test_another_version_of_our_opset(tmp_path: Path) -> None:
    model = fused()
    next(opset for opset in model.opset_import if opset.domain == DOMAIN).version = 2
    with pytest.raises(ModelError, match="imports version 2 of opset 'ort_moe', this ort-moe knows version 1"):
        load_model(save(model, tmp_path / "model.onnx"))
