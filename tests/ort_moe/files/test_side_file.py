"""Files beside a result: where they may go, and that they are written as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ort_moe.errors import OutputError
from ort_moe.files.side_file import check_side_file, write_side_file


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.onnx", "it is the input"),
        ("link", "it is the input"),
        ("absent/report.json", "there is no folder"),
        ("folder", "it is a folder"),
        ("other.txt", "it exists and is no report"),
        ("short", "it exists and is no report"),
    ],
)
def test_where_it_cannot_go(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"{{ as a report begins")
    (tmp_path / "link").symlink_to("model.onnx")
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.txt").write_text("a text")
    (tmp_path / "short").write_text("{")
    with pytest.raises(OutputError, match=rf"^cannot write the report {tmp_path / name}: {sentence}"):
        check_side_file(tmp_path / name, "report", source=tmp_path / "model.onnx", begins=b"{{")


def test_where_it_can(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "old").write_text("{ }")
    for name in ("new", "empty", "old"):
        check_side_file(tmp_path / name, "report", source=tmp_path / "model.onnx", begins=b"{")


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    def full(staged: Path) -> None:
        staged.write_text("half")
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.json"
    with pytest.raises(OutputError, match=r"^cannot write the report .*report\.json: No space left on device$"):
        write_side_file(path, "report", full)
    assert not list(tmp_path.iterdir())
    write_side_file(path, "report", lambda staged: staged.write_text("whole"))
    assert path.read_text() == "whole"
    with pytest.raises(OutputError, match="cannot write the report"):
        write_side_file(tmp_path / "absent" / "report.json", "report", full)
