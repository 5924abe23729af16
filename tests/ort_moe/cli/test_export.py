"""ort-moe export, as far as it comes without PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ort_moe.cli.exit_codes import ExitCode
from tests.ort_moe.cli.conftest import Command
from tests.ort_moe.exporting.folders import model_folder


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_pytorch(ort_moe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, missing, None)
    outcome = ort_moe("export", model_folder(tmp_path / "model"), "-o", tmp_path / "out")
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert outcome.err.startswith("ort-moe: error: an export needs PyTorch and transformers")
    assert outcome.err.endswith("install ort-moe[export]\n")
    assert outcome.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_no_model_folder(ort_moe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told at once, before PyTorch is loaded or missed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "model").mkdir()
    outcome = ort_moe("export", tmp_path / "model", "-o", tmp_path / "out")
    assert outcome.code == ExitCode.ERROR
    assert outcome.err == (
        f"ort-moe: error: {tmp_path / 'model'} is no Hugging Face model folder: there is no config.json in it\n"
    )


def test_output_that_exists(ort_moe: Command, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    outcome = ort_moe("export", model_folder(tmp_path / "model"), "-o", tmp_path / "out")
    assert outcome.code == ExitCode.ERROR
    assert "out: it exists; name another output, or use --force to replace it" in outcome.err
    assert list((tmp_path / "out").iterdir()) == []


def test_force_replaces_exports_alone(ort_moe: Command, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letter.txt").write_text("dear")
    outcome = ort_moe("export", model_folder(tmp_path / "model"), "-o", tmp_path / "out", "--force")
    assert outcome.code == ExitCode.ERROR
    assert "out: it exists and is no model folder, and only such are replaced" in outcome.err
    assert (tmp_path / "out/letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-o", "out", "--batch", "0"),
        ("-o", "out", "--max-length", "1"),
        ("-o", "out", "--precision", "fp8"),
    ],
)
def test_usage(ort_moe: Command, tmp_path: Path, options: tuple[str, ...]) -> None:
    outcome = ort_moe("export", model_folder(tmp_path / "model"), *options)
    assert outcome.code == ExitCode.USAGE
    assert "Usage:" in outcome.err
