"""ort-moe optimize, of a model folder of onnxruntime-genai."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from ort_moe.cli.exit_codes import ExitCode
from ort_moe.errors import LeftoverWarning
from ort_moe.installation.library import NAME
from tests.genai_folders import config, contents, genai_folder
from tests.ort_moe.cli.conftest import Command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return genai_folder(tmp_path / "in")


def test_done(ort_moe: Command, folder: Path) -> None:
    output, report = folder.with_name("out"), folder.with_name("report.json")
    outcome = ort_moe("optimize", folder, "-o", output, "--report", report)
    assert outcome.code == ExitCode.DONE
    lines = outcome.out.splitlines()
    assert lines[0].endswith("model.onnx: 1 router fused whole, without experts")
    assert lines[-2:] == [
        f"for cpu: custom ops by {NAME} in the folder, 2 files carried over",
        f"written: {output}",
    ]
    assert outcome.err == ""
    assert (output / NAME).exists()
    document = json.loads(report.read_text())
    assert document["library"] == NAME
    assert document["models"][0]["verification"]["passed"] is True


def test_dry_run_with_explanation(ort_moe: Command, folder: Path) -> None:
    outcome = ort_moe("optimize", folder, "--dry-run", "--explain")
    assert outcome.code == ExitCode.DONE
    assert "nothing written" in outcome.out
    assert "site 0: choice" in outcome.out
    assert [path.name for path in folder.parent.iterdir()] == ["in"]


def test_nothing_matched_fails_where_asked(ort_moe: Command, folder: Path) -> None:
    outcome = ort_moe("optimize", folder, "-o", folder.with_name("out"), "--skip", "seed-topk", "--fail-on-no-match")
    assert outcome.code == ExitCode.NOTHING_MATCHED
    assert [path.name for path in folder.parent.iterdir()] == ["in"]


def test_existing_output(ort_moe: Command, folder: Path) -> None:
    output = folder.with_name("out")
    for options, code in (((), ExitCode.DONE), ((), ExitCode.ERROR), (("--force",), ExitCode.DONE)):
        outcome = ort_moe("optimize", folder, "-o", output, "--no-verify", *options)
        assert outcome.code == code
    outcome = ort_moe("optimize", folder, "-o", output)
    assert outcome.err == (
        f"ort-moe: error: cannot write {output}: it exists; name another output, or use --force to replace it\n"
    )


def test_an_old_output_that_cannot_be_deleted_is_told_of_in_a_line(
    ort_moe: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    output = folder.with_name("out")
    ort_moe("optimize", folder, "-o", output, "--no-verify")
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)
    assert ort_moe("optimize", folder, "-o", output, "--no-verify", "--force").code == ExitCode.DONE
    (warning,) = (each for each in recwarn if issubclass(each.category, LeftoverWarning))
    line = warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno)
    (left,) = (path for path in folder.parent.iterdir() if path.name.endswith(".old"))
    assert line == f"ort-moe: warning: cannot delete {left}, which is of no more use\n"


def test_input_as_output(ort_moe: Command, folder: Path) -> None:
    before = contents(folder)
    outcome = ort_moe("optimize", folder, "-o", folder, "--force")
    assert outcome.code == ExitCode.ERROR
    assert "it is the input, and a folder is never changed in place" in outcome.err
    assert contents(folder) == before


def test_bad_folders(ort_moe: Command, folder: Path) -> None:
    for document, sentence in (
        ({"version": 7, **config()}, "has the version 7, and this ort-moe knows configurations of version 1"),
        ({"model": {"encoder": {}}}, "names no decoder"),
    ):
        (folder / "genai_config.json").write_text(json.dumps(document))
        outcome = ort_moe("optimize", folder, "-o", folder.with_name("out"))
        assert outcome.code == ExitCode.ERROR
        assert sentence in outcome.err
        assert len(outcome.err.splitlines()) == 1
    (folder / "genai_config.json").unlink()
    outcome = ort_moe("optimize", folder, "-o", folder.with_name("out"))
    assert outcome.code == ExitCode.ERROR
    assert "is no model folder of onnxruntime-genai: it has no genai_config.json" in outcome.err
    assert [path.name for path in folder.parent.iterdir()] == ["in"]


def test_report_in_a_folder(ort_moe: Command, folder: Path) -> None:
    before, output = contents(folder), folder.with_name("out")
    for path in (folder / "genai_config.json", folder / "new.json", output / "genai_config.json"):
        outcome = ort_moe("optimize", folder, "-o", output, "--report", path)
        assert outcome.code == ExitCode.ERROR
        assert f"cannot write the report {path}: it lies in the folder {path.parent}" in outcome.err
    assert contents(folder) == before
    assert not output.exists()


@pytest.mark.parametrize("verb", ["inspect", "explain"])
def test_other_verbs_take_the_one_model(ort_moe: Command, folder: Path, verb: str) -> None:
    assert ort_moe(verb, folder).out == ort_moe(verb, folder / "model.onnx").out
    (folder / "genai_config.json").unlink()
    (folder / "other.onnx").touch()
    outcome = ort_moe(verb, folder)
    assert outcome.code == ExitCode.ERROR
    assert outcome.err == (
        f"ort-moe: error: {folder} is a folder of 2 models: name the file of one, model.onnx, other.onnx\n"
    )


def test_interrupted_run_leaves_nothing(folder: Path) -> None:
    """A real process, stopped while it verifies."""
    code = (
        "import signal, time, ort_moe.verification, ort_moe.cli\n"
        "def wait(*_):\n    print('verifying', flush=True)\n    time.sleep(60)\n"
        "ort_moe.verification.verify = wait\n"
        f"ort_moe.cli.main(['optimize', {str(folder)!r}, '-o', {str(folder.with_name('out'))!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "verifying\n"
        assert len(list(folder.parent.iterdir())) == 2  # the folder, and what is staged
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) != 0
    assert [path.name for path in folder.parent.iterdir()] == ["in"]
