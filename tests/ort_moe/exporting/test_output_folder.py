"""A folder comes into place whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_moe.errors import OutputError
from ort_moe.exporting.output_folder import StagedFolder, check_output_folder


def write(staged: StagedFolder, *names: str) -> None:
    for name in names:
        (staged.path / name).write_text(f"new {name}")


def test_commit(tmp_path: Path) -> None:
    with StagedFolder(tmp_path / "out") as staged:
        write(staged, "decode.onnx", "weights.data")
        assert not (tmp_path / "out").exists()
        staged.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["decode.onnx", "weights.data"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~_mask()


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
def test_interrupted(tmp_path: Path, interruption: type[BaseException]) -> None:
    def run() -> None:
        with StagedFolder(tmp_path / "out") as staged:
            write(staged, "decode.onnx")
            raise interruption

    with pytest.raises(interruption):
        run()
    assert list(tmp_path.iterdir()) == []


def test_into_a_folder_that_exists(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name in ("decode.onnx", "decode.opt.onnx"):
        (output / name).write_text(f"old {name}")
    with StagedFolder(output) as staged:
        write(staged, "decode.onnx", "weights.data")
        staged.commit()
    texts = {path.name: path.read_text() for path in output.iterdir()}
    assert texts == {
        "decode.onnx": "new decode.onnx",
        "decode.opt.onnx": "old decode.opt.onnx",
        "weights.data": "new weights.data",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failed_commit(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "decode.onnx").mkdir(parents=True)
    with StagedFolder(output) as staged:
        write(staged, "decode.onnx")
        with pytest.raises(OutputError, match=r"cannot write .*out: "):
            staged.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_refused(tmp_path: Path) -> None:
    source, output = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    check_output_folder(output, source=source)
    output.mkdir()
    with pytest.raises(OutputError, match="it exists; name another output, or let --force replace"):
        check_output_folder(output, source=source)
    check_output_folder(output, source=source, force=True)
    with pytest.raises(OutputError, match="it is the model's own folder"):
        check_output_folder(source, source=source, force=True)
    with pytest.raises(OutputError, match="there is no folder"):
        check_output_folder(tmp_path / "absent" / "out", source=source)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="it exists and is no folder"):
        check_output_folder(tmp_path / "file", source=source, force=True)
