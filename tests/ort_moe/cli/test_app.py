"""The command as a whole: it answers at once, and its exit codes mean what they say."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ort_moe.choices import PRECISIONS, TARGETS, WEIGHTS
from ort_moe.cli.exit_codes import ExitCode
from tests.ort_moe.cli.conftest import Command
from tests.ort_moe.tiny_models import original, save

VERBS = ("export", "optimize", "inspect", "explain", "verify", "bench", "doctor", "ops", "rules")
HEAVY = ("numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich", "torch", "transformers", "ort_moe.rewrites")
SECONDS = 0.3


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ, check=False)


def test_help_lists_every_verb(ort_moe: Command) -> None:
    outcome = ort_moe("--help")
    assert outcome.code == ExitCode.DONE
    for verb in VERBS:
        assert f"\n  {verb} " in outcome.out
        assert ort_moe(verb, "--help").code == ExitCode.DONE
    assert "5 environment unfit" in " ".join(outcome.out.split())


def test_version(ort_moe: Command) -> None:
    outcome = ort_moe("--version")
    assert outcome.code == ExitCode.DONE
    assert outcome.out == f"ort-moe {importlib.metadata.version('ort-moe')}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ort_moe.cli import main\ntry:\n    main(['--help'])\nfinally:\n"
        f"    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    assert _python("-c", code).stderr.strip() == "[]"


def test_help_is_immediate() -> None:
    """Processor time, for other tests may run at the same moment; the best of ten, as far as they are needed."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _python("-m", "ort_moe.cli", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < SECONDS for _ in range(10))


def test_full_disk_behind_stdout_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        outcome = subprocess.run(
            [sys.executable, "-m", "ort_moe.cli", "rules"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert outcome.returncode == ExitCode.ERROR
    assert outcome.stderr == "ort-moe: error: [Errno 28] No space left on device\n"


def test_interrupt_that_packages_turn_into_an_error() -> None:
    """As NumPy does while it is imported."""
    code = (
        "import os, signal, ort_moe.cli as cli\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def app(**_):\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n        raise RecursionError\ncli.app = app\ncli.main()"
    )
    outcome = _python("-c", code)
    assert outcome.returncode == 130
    assert outcome.stderr == ""


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    path = save(original(), tmp_path / "\N{GREEK SMALL LETTER ALPHA}.onnx")
    outcome = subprocess.run(
        [sys.executable, "-m", "ort_moe.cli", "inspect", str(path)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == ExitCode.DONE, outcome.stderr
    assert "\\u03b1.onnx" in outcome.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-verb",),
        ("export",),
        ("optimize",),
        ("optimize", "model.onnx"),
        ("optimize", "model.onnx", "-o", "out.onnx", "--target", "tpu"),
        ("optimize", "model.onnx", "-o", "out.onnx", "--rules", "softmax", "--skip", "softmax"),
        ("verify", "model.onnx"),
        ("ops", "NoSuchOp"),
        ("rules", "no-such-rule"),
    ],
)
def test_usage(ort_moe: Command, arguments: tuple[str, ...]) -> None:
    outcome = ort_moe(*arguments)
    assert outcome.code == ExitCode.USAGE
    assert not outcome.out
    assert "Usage:" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("verb", ["inspect", "explain"])
def test_error_is_one_sentence(ort_moe: Command, verb: str) -> None:
    outcome = ort_moe(verb, "/no/such/model.onnx")
    assert outcome.code == ExitCode.ERROR
    assert outcome.err == "ort-moe: error: cannot read /no/such/model.onnx: No such file or directory\n"


def test_exit_codes_are_stable() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "ERROR": 1,
        "USAGE": 2,
        "NOTHING_MATCHED": 3,
        "VERIFICATION_FAILED": 4,
        "ENVIRONMENT_UNFIT": 5,
    }


@pytest.mark.parametrize(
    ("verb", "option", "choices"),
    [
        ("optimize", "--target", TARGETS),
        ("explain", "--target", TARGETS),
        ("optimize", "--weights", WEIGHTS),
        ("export", "--precision", PRECISIONS),
        ("verify", "--provider", ("cpu", "cuda")),
        ("bench", "--provider", ("cpu", "cuda")),
    ],
)
def test_options_offer_them(ort_moe: Command, verb: str, option: str, choices: tuple[str, ...]) -> None:
    help_text = ort_moe(verb, "--help").out
    assert f"{option} <{'|'.join(choices)}>" in help_text.replace("[", "<").replace("]", ">")
    outcome = ort_moe(verb, "in", "out", option, "tpu")
    assert outcome.code == ExitCode.USAGE
    assert "'tpu' is not one of" in outcome.err
