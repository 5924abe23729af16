"""ort-moe optimize."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import models.fixtures
from ort_moe.cli.exit_codes import ExitCode
from ort_moe.optimization.optimize import optimize
from ort_moe.rewrites import RULES
from ort_moe.verification import SiteCheck, Verification
from tests.contrib_models import ContribCase
from tests.ort_moe.cli.conftest import Command
from tests.ort_moe.large_models import LargeModel


def test_done(ort_moe: Command, source: Path) -> None:
    output = source.with_name("out.onnx")
    outcome = ort_moe("optimize", source, "-o", output)
    assert outcome.code == ExitCode.DONE
    lines = outcome.out.splitlines()
    assert lines[0].endswith("model.onnx: 1 router fused whole, without experts")
    assert lines[1] == "  fused whole: 16 experts; softmax, top 2 (choice)"
    assert lines[2] == "  left as it is: experts; OM015 experts-form (choice)"
    assert lines[-1] == f"written: {output}"
    assert any(line.startswith("verified: ") for line in lines)
    assert len(lines) <= 7
    assert outcome.err == ""
    assert output.exists()


def test_weights_too_small_for_their_format_stay(ort_moe: Command, tmp_path: Path) -> None:
    """As README.md and docs/models.md say of the sample models."""
    model, output = models.fixtures.get("mixtral_block_dynamo_fp32").path, tmp_path / "out.onnx"
    outcome = ort_moe("optimize", model, "-o", output, "--weights", "nvfp4")
    assert outcome.code == 0
    assert "weights not packed: the inner size must be a multiple of 16, but is 8; fp8 takes any size" in outcome.out
    assert output.exists()


def test_weights(ort_moe: Command, tmp_path: Path) -> None:
    model, output = models.fixtures.get("mixtral_block_dynamo_fp32").path, tmp_path / "out.onnx"
    outcome = ort_moe("optimize", model, "-o", output, "--weights", "fp8", "--block-size", "16")
    assert outcome.code == ExitCode.DONE
    assert "weights of 1 layer of experts packed to fp8 in blocks of 16: " in outcome.out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--weights", "int5"), "'int5' is not one of"),
        (("--block-size", "32"), "nothing is packed without it"),
        (("--weights", "mxfp4", "--block-size", "16"), "the block size is always 32, but 16 was asked for"),
        (("--weights", "fp8", "--zero-points"), "fp8 has no zero points"),
        (("--weights", "fp8", "--target", "contrib"), "contrib nodes keep the weights that they have"),
    ],
)
def test_weights_that_cannot_be(ort_moe: Command, source: Path, options: tuple[str, ...], sentence: str) -> None:
    outcome = ort_moe("optimize", source, "--dry-run", *options)
    assert outcome.code == ExitCode.USAGE
    assert sentence in " ".join(outcome.err.split())


def test_explain(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("optimize", source, "-o", source.with_name("out.onnx"), "--explain")
    assert outcome.code == ExitCode.DONE
    for expected in ("by the rules: softmax", "all nodes", "all, idle ones too", "near ties", "PASSED"):
        assert expected in outcome.out


def test_what_was_not_fused_is_told(ort_moe: Command, classifier: Path) -> None:
    outcome = ort_moe("optimize", classifier, "--dry-run")
    assert "  left as it is: OM001 topk-not-a-router (choice)\n" in outcome.out
    assert "tells why" not in outcome.out  # there is nothing to do about it


def test_where_to_read_more(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("optimize", source, "--dry-run", "--skip", "seed-topk")
    assert "  left as it is: OM008 rule-left-out (choice)\n" in outcome.out
    assert "the same command with `--explain` tells why, and what to do about it" in outcome.out
    assert "OM008" in ort_moe("optimize", source, "--dry-run", "--skip", "seed-topk", "--explain").out


def test_the_command_that_tells_more_tells_of_the_same_target(ort_moe: Command, tmp_path: Path) -> None:
    source = tmp_path / "a model.onnx"
    source.write_bytes(models.fixtures.get("glm4_moe_block_dynamo_fp32").path.read_bytes())
    outcome = ort_moe("optimize", source, "--dry-run", "--target", "contrib")
    command = re.search(r"`ort-moe (.*)` tells why, and what to do about it", outcome.out)
    assert command is not None
    assert "OM024" in ort_moe(*shlex.split(command[1])).out


def test_contrib_nodes_for_contrib(ort_moe: Command, tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    onnx.save(ContribCase().model(), source)
    outcome = ort_moe("optimize", source, "--dry-run", "--target", "contrib")
    assert "in ONNX Runtime's own nodes already (1 block), nothing changed" in outcome.out


def test_report(ort_moe: Command, source: Path) -> None:
    report = source.with_name("report.json")
    assert ort_moe("optimize", source, "-o", source.with_name("out.onnx"), "--report", report).code == ExitCode.DONE
    document = json.loads(report.read_text())
    assert document["matched"] is True
    assert document["verification"]["passed"] is True


def test_report_that_cannot_be_written(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("optimize", source, "--dry-run", "--report", source / "report.json")
    assert outcome.code == ExitCode.ERROR
    assert "cannot write the report" in outcome.err


def test_report_replaces_nothing_else(ort_moe: Command, source: Path) -> None:
    folder = source.parent
    output, data, other = (folder / name for name in ("out.onnx", "out.data", "other.txt"))
    other.write_text("a text")
    before = source.read_bytes()
    for report, sentence in (
        (source, "it is the input"),
        (output, "the model goes there"),
        (folder / "absent" / ".." / "out.onnx", "there is no folder"),
        (folder / ".." / folder.name / "out.onnx", "the model goes there"),
        (data, "the model goes there"),
        (other, "it exists and is no report"),
        (folder / "absent" / "report.json", "there is no folder"),
    ):
        outcome = ort_moe("optimize", source, "-o", output, "--external-data", "out.data", "--report", report)
        assert outcome.code == ExitCode.ERROR
        assert "cannot write the report" in outcome.err
        assert sentence in outcome.err
        assert source.read_bytes() == before
        assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "other.txt"]
    report = folder / "report.json"
    for _ in range(2):
        assert ort_moe("optimize", source, "--dry-run", "--report", report).code == ExitCode.DONE


def test_report_beside_kept_weights(ort_moe: Command, source: Path) -> None:
    """Weights that are made anew may take a file of that name; `keep` is no file."""
    output = source.with_name("out.onnx")
    outcome = ort_moe("optimize", source, "-o", output, "--report", source.with_name("out.onnx.data"))
    assert outcome.code == ExitCode.ERROR
    assert "the model goes there" in outcome.err
    report = source.with_name("keep")
    assert ort_moe("optimize", source, "-o", output, "--report", report).code == ExitCode.DONE
    assert json.loads(report.read_text())["matched"] is True


@pytest.mark.parametrize("name", ["", "weights/all.data"])
def test_report_beside_weights_that_have_no_place(ort_moe: Command, source: Path, name: str) -> None:
    """What is wrong with their name is told as it is without a report."""
    report, output = source.with_name("report.json"), source.with_name("out.onnx")
    outcome = ort_moe("optimize", source, "-o", output, "--external-data", name, "--report", report)
    assert outcome.code == ExitCode.ERROR
    assert "a file name without a folder is expected" in outcome.err
    assert list(source.parent.iterdir()) == [source]


def test_dry_run_with_explanation(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("optimize", source, "--dry-run", "--explain")
    assert outcome.code == ExitCode.DONE
    assert "nothing written" in outcome.out
    assert "site 0: choice" in outcome.out
    assert [path.name for path in source.parent.iterdir()] == ["model.onnx"]


def test_nothing_matched(ort_moe: Command, classifier: Path) -> None:
    output = classifier.with_name("out.onnx")
    outcome = ort_moe("optimize", classifier, "-o", output)
    assert outcome.code == ExitCode.DONE
    assert "nothing matched" in " ".join(outcome.out.split())
    assert output.exists()


def test_nothing_matched_fails_where_asked(ort_moe: Command, classifier: Path) -> None:
    output = classifier.with_name("out.onnx")
    outcome = ort_moe("optimize", classifier, "-o", output, "--fail-on-no-match")
    assert outcome.code == ExitCode.NOTHING_MATCHED
    assert not output.exists()


def test_failed_verification(ort_moe: Command, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = SiteCheck("choice", "failed", detail="weights differ")
    failed = Verification("a", "b", (site,), (), 1e-4)
    monkeypatch.setattr("ort_moe.verification.verify", lambda *_: failed)
    output = source.with_name("out.onnx")
    outcome = ort_moe("optimize", source, "-o", output)
    assert outcome.code == ExitCode.VERIFICATION_FAILED
    assert "FAILED: the first router that differs is choice: weights differ" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("ort-moe: error: verification failed, nothing was put in place")
    assert [path.name for path in source.parent.iterdir()] == ["model.onnx"]


def test_unknown_target(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("optimize", source, "--dry-run", "--target", "tpu")
    assert outcome.code == ExitCode.USAGE
    assert "'tpu' is not one of 'cuda', 'cpu', 'contrib'" in outcome.err


def test_contrib_nodes(ort_moe: Command, tmp_path: Path) -> None:
    mixtral, glm = (models.fixtures.get(f"{name}_block_dynamo_fp32").path for name in ("mixtral", "glm4_moe"))
    outcome = ort_moe("optimize", mixtral, "-o", tmp_path / "out.onnx", "--target", "contrib")
    assert outcome.code == ExitCode.DONE
    assert "1 router fused whole, with experts" in outcome.out
    assert "com.microsoft::MoE +1" in outcome.out
    assert "verified: each contrib block on the original's own values" in outcome.out
    outcome = ort_moe("optimize", glm, "--dry-run", "--target", "contrib", "--fail-on-no-match")
    assert outcome.code == ExitCode.NOTHING_MATCHED
    assert "OM024 no-contrib-form" in outcome.out


@pytest.mark.parametrize("option", ["--rules", "--skip"])
def test_unknown_rule(ort_moe: Command, source: Path, option: str) -> None:
    outcome = ort_moe("optimize", source, "--dry-run", option, "softmax,no-such-rule")
    assert outcome.code == ExitCode.USAGE
    assert "there is no rule 'no-such-rule'" in outcome.err
    assert all(name in outcome.err for name in RULES)


def test_rules_besides_those_that_run(ort_moe: Command, tmp_path: Path) -> None:
    gated = models.fixtures.get("qwen3_next_block_dynamo_fp32").path
    outcome = ort_moe("optimize", gated, "-o", tmp_path / "out.onnx", "--rules", "+shared-gate")
    assert outcome.code == ExitCode.DONE
    assert "SharedGateRouter +1" in outcome.out
    outcome = ort_moe("optimize", gated, "--dry-run", "--skip", "+shared-gate")
    assert outcome.code == ExitCode.USAGE
    assert "there is no rule '+shared-gate'" in outcome.err


def test_skip(ort_moe: Command, source: Path) -> None:
    assert "nothing matched" in " ".join(ort_moe("optimize", source, "--dry-run", "--skip", "seed-topk").out.split())


def test_input_as_output(ort_moe: Command, source: Path) -> None:
    before = source.read_bytes()
    outcome = ort_moe("optimize", source, "-o", source)
    assert outcome.code == ExitCode.ERROR
    assert "it is the input; name another output, or use --force" in outcome.err
    assert source.read_bytes() == before
    assert ort_moe("optimize", source, "-o", source, "--force").code == ExitCode.DONE
    assert source.read_bytes() != before


def test_missing_input(ort_moe: Command, source: Path) -> None:
    """Also where the output is there already, which is compared with the input."""
    for output in (source, source.with_name("new.onnx")):
        outcome = ort_moe("optimize", source.with_name("missing.onnx"), "-o", output)
        assert outcome.code == ExitCode.ERROR
        assert "missing.onnx" in outcome.err
        assert "Traceback" not in outcome.err


def test_external_data(ort_moe: Command, source: Path) -> None:
    output = source.with_name("out.onnx")
    assert ort_moe("optimize", source, "-o", output, "--external-data", "out.data").code == ExitCode.DONE
    assert source.with_name("out.data").stat().st_size > 0


def test_without_a_runtime(ort_moe: Command, source: Path, no_onnxruntime: None) -> None:
    output = source.with_name("out.onnx")
    outcome = ort_moe("optimize", source, "-o", output)
    assert outcome.code == ExitCode.DONE
    assert "not verified: no ONNX Runtime is installed" in outcome.out
    assert output.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_run_leaves_nothing(source: Path, number: signal.Signals) -> None:
    """A real process, stopped while it verifies."""
    code = (
        "import signal, time, ort_moe.verification, ort_moe.cli\n"
        # Shells have SIGINT ignored by what they run in the background, and nohup SIGHUP: these tests, too.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "def wait(*_):\n    print('verifying', flush=True)\n    time.sleep(60)\n"
        "ort_moe.verification.verify = wait\n"
        f"ort_moe.cli.main(['optimize', {str(source)!r}, '-o', {str(source.with_name('out.onnx'))!r}, "
        "'--external-data', 'out.data'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "verifying\n"
        assert len(list(source.parent.iterdir())) == 2  # the model, and what is staged
        process.send_signal(number)
        assert process.wait(timeout=30) != 0  # less than the 60 s that it would verify
    assert [path.name for path in source.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("stopped_in", ["ort_moe.verification.verify", "ort_moe.files.weights_file.WeightsFile.write"])
def test_killed_run_leaves_input_and_earlier_output(tmp_path: Path, stopped_in: str) -> None:
    """While it verifies, or while it writes packed weights; what it leaves behind is in nobody's way."""
    source = LargeModel(layers=1, experts=4, hidden=64, inner=64).write(tmp_path / "model.onnx")
    output = tmp_path / "out.onnx"
    optimize(source, output, weights="int8", block_size=64)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    module, _, name = stopped_in.rpartition(".")
    code = (
        "import time, ort_moe.verification, ort_moe.files.weights_file, ort_moe.cli\n"
        "def wait(*_):\n    print('stopped', flush=True)\n    time.sleep(60)\n"
        f"setattr({module}, {name!r}, wait)\n"
        f"ort_moe.cli.main(['optimize', {str(source)!r}, '-o', {str(output)!r}, '--force', '--weights', 'nvfp4'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stopped\n"
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert optimize(source, output, weights="nvfp4", force=True).verification is not None
    assert output.with_name("out.onnx.data").read_bytes() != before["out.onnx.data"]
