"""Writing a model without ever leaving half of something."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_moe.errors import OutputError
from ort_moe.files.loading import data_files, load_model
from ort_moe.files.staged_model import StagedModel, check_target
from ort_moe.files.streamed_tensor import StreamedTensor
from tests.ort_moe.tiny_models import original, save
from tests.unreadable import refuse_to_open

_OLD = b"\x08\x0a, as a model begins"


def _weights(path: Path) -> np.ndarray:
    return onnx.numpy_helper.to_array(next(t for t in onnx.load(path).graph.initializer if t.name == "expert_matrices"))


def _stage_and_commit(source: Path, target: Path, **options: object) -> None:
    with StagedModel(load_model(source), target, source=source, **options) as staged:
        assert staged.path.exists()
        staged.commit()


def _turned(source: Path) -> ir.Model:
    """The model with its experts in the opposite order, which is not made before it is written."""
    model = load_model(source)
    value = model.graph.initializers["expert_matrices"]
    tensor = value.const_value
    assert tensor is not None
    last = len(tensor.numpy()) - 1
    shape = ir.Shape(tensor.shape.numpy())
    value.const_value = StreamedTensor(lambda number: tensor.numpy()[last - number], tensor.dtype, shape, "turned")
    return model


def test_same_folder_references_the_data(source: Path) -> None:
    target = source.with_name("out.onnx")
    _stage_and_commit(source, target)
    assert sorted(p.name for p in source.parent.iterdir()) == ["model.onnx", "out.onnx", "weights.bin"]
    np.testing.assert_array_equal(_weights(target), _weights(source))


def test_another_folder_gets_a_copy(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.onnx"
    target.parent.mkdir()
    _stage_and_commit(source, target)
    expected = _weights(source)
    for file in source.parent.iterdir():
        file.unlink()
    assert sorted(p.name for p in target.parent.iterdir()) == ["model.onnx", "weights.bin"]
    np.testing.assert_array_equal(_weights(target), expected)
    load_model(target)


def test_one_named_file(source: Path) -> None:
    target = source.with_name("out.onnx")
    _stage_and_commit(source, target, external_data="out.data")
    assert data_files(load_model(target)) == {"out.data": source.parent / "out.data"}
    np.testing.assert_array_equal(_weights(target), _weights(source))
    with pytest.raises(OutputError, match="it exists"):
        _stage_and_commit(source, target, external_data="out.data")
    _stage_and_commit(source, target, external_data="out.data", force=True)


@pytest.mark.parametrize("folder", ["in", "out"])
def test_weights_made_anew_get_a_file(source: Path, tmp_path: Path, folder: str) -> None:
    target = tmp_path / folder / "out.onnx"
    target.parent.mkdir(exist_ok=True)
    with StagedModel(_turned(source), target, source=source) as staged:
        np.testing.assert_array_equal(_weights(staged.path), _weights(source)[::-1])
        staged.commit()
    assert set(data_files(load_model(target))) == {"out.onnx.data", "weights.bin"}
    np.testing.assert_array_equal(_weights(target), _weights(source)[::-1])
    files = {"out.onnx", "out.onnx.data", "weights.bin"} | ({"model.onnx"} if folder == "in" else set())
    assert {path.name for path in target.parent.iterdir()} == files
    assert target.with_name("out.onnx.data").stat().st_mode == source.stat().st_mode


@pytest.mark.parametrize("folder", ["in", "out"])
def test_weights_made_anew_beside_weights_of_the_name_that_theirs_would_have(
    source: Path, tmp_path: Path, folder: str
) -> None:
    proto = onnx.load(source)
    onnx.save(proto, source, save_as_external_data=True, location="out.onnx.data", size_threshold=0)
    target = tmp_path / folder / "out.onnx"
    target.parent.mkdir(exist_ok=True)
    with StagedModel(_turned(source), target, source=source) as staged:
        staged.commit()
    assert set(data_files(load_model(target))) == {"out.onnx.data", "out.onnx.2.data"}
    np.testing.assert_array_equal(_weights(target), _weights(source)[::-1])
    kept = load_model(target).graph.initializers["router_matrix"].const_value
    assert kept is not None
    before = load_model(source).graph.initializers["router_matrix"].const_value
    assert before is not None
    np.testing.assert_array_equal(kept.numpy(), before.numpy())


def test_weights_made_anew_of_one_file_stay_in_it(tmp_path: Path) -> None:
    source, target = save(original(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    with StagedModel(_turned(source), target, source=source) as staged:
        staged.commit()
    np.testing.assert_array_equal(_weights(target), _weights(source)[::-1])
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "out.onnx"}


def test_weights_made_anew_replace_no_other_file(source: Path) -> None:
    target = source.with_name("out.onnx")
    foreign = source.with_name("out.onnx.data")
    foreign.write_bytes(b"another model's")
    with pytest.raises(OutputError, match=r"out\.onnx\.data: it exists and may belong to another model"):
        StagedModel(_turned(source), target, source=source)
    assert foreign.read_bytes() == b"another model's"


@pytest.mark.parametrize("name", ["out.onnx", "out.onnx.data"])
def test_what_comes_meanwhile_is_not_replaced(source: Path, name: str) -> None:
    before = {path.name for path in source.parent.iterdir()}
    with StagedModel(_turned(source), source.with_name("out.onnx"), source=source) as staged:
        source.with_name(name).write_bytes(b"of another run")
        with pytest.raises(OutputError, match=f"cannot write .*{name}: it has come into being meanwhile"):
            staged.commit()
    assert source.with_name(name).read_bytes() == b"of another run"
    assert {path.name for path in source.parent.iterdir()} == {*before, name}


def test_usual_permissions(source: Path) -> None:
    target = source.with_name("out.onnx")
    _stage_and_commit(source, target)
    fresh = source.with_name("fresh")
    fresh.touch()
    assert target.stat().st_mode == fresh.stat().st_mode


@pytest.mark.parametrize("external_data", ["keep", "out.data"])
def test_without_a_commit_nothing_is_left(source: Path, tmp_path: Path, external_data: str) -> None:
    target = tmp_path / "out" / "model.onnx"
    target.parent.mkdir()
    with StagedModel(load_model(source), target, source=source, external_data=external_data) as staged:
        load_model(staged.path)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_interrupted_while_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("onnx_ir.save", interrupted)
    target = tmp_path / "out" / "model.onnx"
    target.parent.mkdir()
    expected = OutputError if error is OSError else error
    for external_data in ("keep", "out.data"):
        with pytest.raises(expected):
            StagedModel(load_model(source), target, source=source, external_data=external_data)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize(
    ("method", "before"),
    [("rename", ["out.data", "out.onnx"]), ("replace", ["out.data", "out.onnx"]), ("replace", ["out.onnx"])],
)
def test_interrupted_right_behind_the_move_of_the_data(
    source: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], method: str, before: list[str]
) -> None:
    """A model keeps the data that it was made with, or there is neither."""
    target = source.with_name("out.onnx")
    for name in before:
        target.with_name(name).write_bytes(_OLD)
    move, moved = getattr(Path, method), []

    def interrupted(path: Path, to: Path) -> Path:
        result: Path = move(path, to)
        if "out.data" in (path.name, to.name) and not moved:
            moved.append(path)
            raise kind
        return result

    def replace_them() -> None:
        with StagedModel(load_model(source), target, source=source, external_data="out.data", force=True) as staged:
            monkeypatch.setattr(Path, method, interrupted)
            staged.commit()

    with pytest.raises(OutputError if kind is OSError else kind):
        replace_them()
    assert moved
    assert {path.name for path in source.parent.iterdir()} == {"model.onnx", "weights.bin", *before}
    assert all(target.with_name(name).read_bytes() == _OLD for name in before)


def test_interrupted_right_behind_the_move_of_the_model(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.with_name("out.onnx")
    for name in ("out.onnx", "out.data"):
        target.with_name(name).write_bytes(_OLD)
    replace = Path.replace

    def interrupted(path: Path, to: Path) -> Path:
        result = replace(path, to)
        if to == target:
            raise KeyboardInterrupt
        return result

    def replace_them() -> None:
        with StagedModel(load_model(source), target, source=source, external_data="out.data", force=True) as staged:
            monkeypatch.setattr(Path, "replace", interrupted)
            staged.commit()

    with pytest.raises(KeyboardInterrupt):
        replace_them()
    np.testing.assert_array_equal(_weights(target), _weights(source))
    assert {path.name for path in source.parent.iterdir()} == {"model.onnx", "weights.bin", "out.onnx", "out.data"}


def test_input_is_not_overwritten(source: Path) -> None:
    before = source.read_bytes()
    link = source.with_name("link.onnx")
    link.symlink_to(source)
    for target in (source, link):
        with pytest.raises(OutputError, match="it is the input"):
            check_target(target, source=source)
    assert source.read_bytes() == before
    check_target(source, source=source, force=True)


@pytest.mark.parametrize("how", ["file", "link"])
def test_model_replaces_no_file_of_another_kind(source: Path, how: str) -> None:
    """Not even where it shall replace what is there: the name is likely to be mistaken."""
    text, target = source.with_name("thesis.txt"), source.with_name("thesis.txt")
    text.write_text("Chapter 1")
    if how == "link":
        target = source.with_name("link")
        target.symlink_to(text)
    with pytest.raises(OutputError, match=f"^cannot write {target}: it exists and is no ONNX model, and only such are"):
        check_target(target, source=source, force=True)
    assert text.read_text() == "Chapter 1"
    text.write_bytes(b"")
    check_target(target, source=source, force=True)
    text.write_bytes(source.read_bytes())
    check_target(target, source=source, force=True)


def test_existing_file_that_cannot_be_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.with_name("out.onnx")
    target.write_bytes(_OLD)
    refuse_to_open(monkeypatch, target)
    with pytest.raises(OutputError, match="it exists and cannot be read, to see whether it is a model"):
        check_target(target, source=source, force=True)


def test_data_of_another_model_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    foreign = folder / "weights.bin"
    foreign.write_bytes(b"another model's")
    for external_data in ("keep", "weights.bin"):
        with pytest.raises(OutputError, match=r"weights\.bin: it exists and may belong to another model"):
            StagedModel(load_model(source), folder / "model.onnx", source=source, external_data=external_data)
    assert foreign.read_bytes() == b"another model's"
    assert list(folder.iterdir()) == [foreign]


def test_data_of_the_input_is_not_overwritten(source: Path) -> None:
    with pytest.raises(OutputError, match="the input's own weights"):
        StagedModel(
            load_model(source), source.with_name("out.onnx"), source=source, external_data="weights.bin", force=True
        )
    load_model(source)


def test_model_does_not_replace_the_weights(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where these begin as a model does, by chance."""
    monkeypatch.setattr("ort_moe.files.staged_model.begins_like_a_model", lambda _: True)
    folder = tmp_path / "out"
    folder.mkdir()
    weights = source.with_name("weights.bin")
    link = source.with_name("link.bin")
    link.hardlink_to(weights)
    before = weights.read_bytes()
    for external_data in ("keep", "out.data"):
        for target in (weights, link):
            with pytest.raises(OutputError, match="it holds the input's own weights"):
                StagedModel(load_model(source), target, source=source, external_data=external_data, force=True)
    with pytest.raises(OutputError, match="the input's weights lie in a file of that name"):
        StagedModel(load_model(source), folder / "weights.bin", source=source, force=True)
    assert weights.read_bytes() == before
    assert list(folder.iterdir()) == []


def test_weights_do_not_replace_the_input(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(OutputError, match="it is the input; choose another name"):
        StagedModel(
            load_model(source), source.with_name("out.onnx"), source=source, external_data=source.name, force=True
        )
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [("a/b.data", "without a folder"), ("", "without a folder"), ("out.onnx", "the output itself")],
)
def test_name_of_external_data(source: Path, name: str, message: str) -> None:
    with pytest.raises(OutputError, match=message):
        check_target(source.with_name("out.onnx"), source=source, external_data=name)


def test_no_such_folder(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=re.escape(f"there is no folder {tmp_path / 'absent'}")):
        check_target(tmp_path / "absent" / "out.onnx", source=source)


def test_folder_is_a_file(source: Path) -> None:
    with pytest.raises(OutputError, match="is not a folder"):
        check_target(source / "out.onnx", source=source)


def test_read_only_folder(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(OutputError, match="is read-only"):
        check_target(source.with_name("out.onnx"), source=source)


def test_target_is_a_device(source: Path) -> None:
    with pytest.raises(OutputError, match="it is a device or a pipe"):
        check_target(os.devnull, source=source)


def test_target_is_a_folder(source: Path) -> None:
    with pytest.raises(OutputError, match="it is a folder"):
        check_target(source.parent, source=source)
