"""The headers script takes what it is given and spoils no folder that is not its own."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "ort_headers.sh"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A release archive with one header."""
    include = tmp_path / "onnxruntime-linux-x64-1.30.0" / "include"
    include.mkdir(parents=True)
    (include / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 30\n")
    path = tmp_path / "archive.tgz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(include.parent, include.parent.name)
    return path


def run(folder: Path, archive: Path | str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ORT_ARCHIVE": str(archive)}
    return subprocess.run([SCRIPT, folder], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("as_url", [False, True])
def test_an_archive_again_and_again(tmp_path: Path, archive: Path, as_url: bool) -> None:
    folder = tmp_path / "headers"
    for _ in range(2):
        result = run(folder, f"file://{archive}" if as_url else archive)
        assert (result.returncode, result.stdout) == (0, f"ONNX Runtime C API 30 in {folder}\n")
        assert [path.name for path in folder.iterdir()] == ["onnxruntime_c_api.h"]
    assert not list(tmp_path.glob(".ort-headers*"))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, archive: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").touch()
    result = run(folder, archive)
    assert result.returncode == 1
    assert result.stderr == f"ort_headers.sh: {folder} is there and holds something else\n"
    assert (folder / "thesis.txt").exists()


def test_no_archive(tmp_path: Path) -> None:
    result = run(tmp_path / "headers", tmp_path / "none.tgz")
    assert result.returncode == 1
    assert "ORT_ARCHIVE names no file" in result.stderr
    assert not (tmp_path / "headers").exists()


def test_a_relative_folder_is_made_absolute_at_once(tmp_path: Path, archive: Path) -> None:
    environment = os.environ | {"ORT_ARCHIVE": str(archive)}
    result = subprocess.run([SCRIPT, "a/b"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == f"ONNX Runtime C API 30 in {tmp_path}/a/b\n"
