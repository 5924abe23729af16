"""What is staged takes its place whole, or leaves what was there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_moe.files.staging import file_beside, folder_beside, staged_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_takes_its_place(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    for text in ("one", "another"):
        with staged_file(target) as staged:
            staged.write_text(text)
            assert staged.parent == tmp_path
        assert target.read_text() == text
        assert names(tmp_path) == ["report.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_what_was_there(tmp_path: Path, kind: type[BaseException]) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")

    def interrupted() -> None:
        with staged_file(target) as staged:
            staged.write_text("half")
            raise kind

    with pytest.raises(kind):
        interrupted()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["report.json"]


def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    with staged_file(target) as one, staged_file(target) as two:
        one.write_text("one")
        two.write_text("two")
        assert one.read_text() == "one"
    assert target.read_text() == "one"  # whose run ends last
    assert names(tmp_path) == ["report.json"]
    made = [make(target) for make in (file_beside, file_beside, folder_beside, folder_beside)]
    assert len(set(made)) == 4
    assert all(path.name.startswith(".report.json.") and path.suffix == ".tmp" for path in made)
