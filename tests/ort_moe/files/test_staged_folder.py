"""A folder is put in place as a whole, or not at all, and replaces nothing by mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ort_moe.errors import LeftoverWarning, ModelError, OutputError
from ort_moe.files.staged_folder import StagedFolder, check_folder, files_of
from tests.unreadable import refuse_to_open


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "deep" / "b").write_text("b")
    return folder


def test_commit(source: Path) -> None:
    target = source.with_name("out")
    with StagedFolder(target) as staged:
        for name in files_of(source):
            staged.copy(source / name, name)
        assert not target.exists()
        staged.commit()
    assert files_of(target) == ["a", "deep/b"]
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o777 & ~mask
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_is_not_committed_leaves_nothing(source: Path, kind: type[BaseException]) -> None:
    def interrupted() -> None:
        with StagedFolder(source.with_name("out")) as staged:
            staged.copy(source / "a", "deep/a")
            raise kind

    with pytest.raises(kind):
        interrupted()
    assert [path.name for path in source.parent.iterdir()] == ["in"]


def test_replaces_a_folder_as_a_whole(source: Path) -> None:
    target = source.with_name("out")
    target.mkdir()
    (target / "old").touch()
    with StagedFolder(target, force=True) as staged:
        staged.copy(source / "a", "a")
        staged.commit()
    assert files_of(target) == ["a"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


def test_what_was_there_is_there_again_where_the_move_fails(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.with_name("out")
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def refusing(path: Path, to: Path) -> Path:
        if path.name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refusing)
    with (
        pytest.raises(OutputError, match=r"cannot write .*out: No space left"),
        StagedFolder(target, force=True) as staged,
    ):
        staged.commit()
    assert files_of(target) == ["old"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("behind", "kept"), [(".old", ["old"]), ("out", ["a"])])
def test_an_interrupt_right_behind_a_move(
    source: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], behind: str, kept: list[str]
) -> None:
    target = source.with_name("out")
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        moved = rename(path, to)
        if to.name.endswith(behind):
            monkeypatch.undo()
            raise kind
        return moved

    def replace_it() -> None:
        with StagedFolder(target, force=True) as staged:
            staged.copy(source / "a", "a")
            monkeypatch.setattr(Path, "rename", interrupted)
            staged.commit()

    with pytest.raises(kind):
        replace_it()
    assert files_of(target) == kept
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


def test_an_interrupt_while_the_old_folder_is_deleted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.with_name("out")
    target.mkdir()
    (target / "old").touch()

    def replace_it() -> None:
        with StagedFolder(target, force=True) as staged:
            staged.copy(source / "a", "a")
            monkeypatch.setattr(os, "unlink", interrupted)
            staged.commit()

    def interrupted(path: object, **_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_it()
    assert files_of(target) == ["a"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


def test_an_old_folder_that_cannot_be_deleted_is_told_of(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = source.with_name("out")
    target.mkdir()
    (target / "old").touch()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    def replace_it() -> None:
        with StagedFolder(target, force=True) as staged:
            staged.copy(source / "a", "a")
            monkeypatch.setattr(os, "unlink", refused)
            staged.commit()

    with pytest.warns(LeftoverWarning, match=r"cannot delete .*\.tmp\.old, which is of no more use"):
        replace_it()
    assert files_of(target) == ["a"]


def test_what_comes_meanwhile_is_not_replaced(source: Path) -> None:
    target = source.with_name("out")
    with StagedFolder(target) as staged:
        target.mkdir()
        (target / "of another run").touch()
        with pytest.raises(OutputError, match=r"cannot write .*out: it has come into being meanwhile"):
            staged.commit()
    assert files_of(target) == ["of another run"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["in", "out"]


def test_errors_tell_of_the_output(source: Path) -> None:
    target = source.with_name("out")
    with (
        StagedFolder(target) as staged,
        pytest.raises(OutputError, match=f"cannot write {target}/{'x' * 300}: File name too long"),
    ):
        staged.copy(source / "a", "x" * 300)


def test_a_file_that_cannot_be_read_is_told_as_such(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        StagedFolder(source.with_name("out")) as staged,
        pytest.raises(ModelError, match=f"cannot read {source}/c: No such file"),
    ):
        staged.copy(source / "c", "deep/c")
    refuse_to_open(monkeypatch, source / "deep" / "b")
    with pytest.raises(ModelError, match=f"cannot read {source}/deep/b: Permission denied"):
        files_of(source)


def test_places_where_nothing_is_put(source: Path) -> None:
    root = source.parent
    (root / "file").touch()
    (root / "link").symlink_to(source)
    (root / "full").mkdir()
    (root / "full" / "letter").touch()
    for name, sentence in (
        ("in", "it is the input, and a folder is never changed in place"),
        ("link", "it is the input"),
        ("in/deep/out", "it lies in the input"),
        (".", "the input lies in it"),
        ("missing/out", "there is no folder"),
        ("file/out", "is not a folder"),
        ("file", "it exists and is no folder"),
        ("full", "it exists and is no model folder, and only such are replaced"),
    ):
        with pytest.raises(OutputError, match=sentence):
            check_folder(Path(os.path.normpath(root / name)), source, lambda _: False, force=True)
    check_folder(root / "full", source, lambda there: there.name == "full", force=True)
    check_folder(root / "new", source, lambda _: False, force=False)


def test_a_folder_that_exists(source: Path) -> None:
    target = source.with_name("out")
    target.mkdir()
    with pytest.raises(OutputError, match="it exists; name another output, or use --force to replace it"):
        check_folder(target, source, lambda _: True, force=False)
    check_folder(target, source, lambda _: False, force=True)  # for it is empty


def test_links_count_as_what_they_lead_to(source: Path) -> None:
    (source.parent / "blob").write_text("x")
    (source / "link").symlink_to(source.parent / "blob")
    (source.parent / "more").mkdir()
    (source.parent / "more" / "c").touch()
    (source / "linked").symlink_to(source.parent / "more")
    assert files_of(source) == ["a", "deep/b", "link", "linked/c"]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "x").symlink_to("nowhere"), "x: it is a link to a file that is not there"),
        (lambda folder: os.mkfifo(folder / "x"), "x: it is no regular file"),
        (lambda folder: (folder / "deep" / "x").symlink_to(folder), "x: it is a link to a folder that it lies in"),
    ],
)
def test_what_cannot_be_carried_over(source: Path, spoil: object, sentence: str) -> None:
    assert callable(spoil)
    spoil(source)
    with pytest.raises(ModelError, match=f"cannot read .*{sentence}"):
        files_of(source)
