"""ort-moe bench."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnxruntime
import pytest

from ort_moe.cli.exit_codes import ExitCode
from tests.ort_moe.benchmarking.models import EXPORT, not_loadable
from tests.ort_moe.cli.conftest import Command
from tests.ort_moe.published_schemas import check
from tests.ort_moe.tiny_models import fused, save

pytestmark = pytest.mark.usefixtures("in_this_process")

QUICK = ("--provider", "cpu", "--steps", "2")


def test_table(ort_moe: Command, source: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    optimized = save(fused(), source.with_name("opt.onnx"))
    outcome = ort_moe("bench", source, optimized, *QUICK, "--tokens", "1,2", "--plot", plot)
    assert outcome.code == ExitCode.DONE
    assert "as given" in outcome.out
    assert "ours" in outcome.out
    assert "contrib: nothing matched, nothing changed; OM" in outcome.out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json(ort_moe: Command) -> None:
    outcome = ort_moe("bench", EXPORT, *QUICK, "--tokens", "1", "--weights", "fp8", "--json")
    assert outcome.code == ExitCode.DONE
    document = json.loads(outcome.out)
    check("bench", document)
    assert [variant["name"] for variant in document["variants"]] == ["as given", "contrib", "ours, fp8"]
    assert document["variants"][2]["timings"][0]["times_faster"] > 0
    assert "GB/s of experts" in outcome.err


def test_nothing_measured(ort_moe: Command, tmp_path: Path) -> None:
    path = save(not_loadable(), tmp_path / "broken.onnx")
    plot = tmp_path / "plot.png"
    outcome = ort_moe("bench", path, path, *QUICK, "--json", "--plot", plot)
    assert outcome.code == ExitCode.ERROR
    document = json.loads(outcome.out)
    check("bench", document)
    assert {variant["status"] for variant in document["variants"]} <= {"failed", "impossible"}
    assert "ONNX Runtime does not take" in outcome.err
    assert not plot.exists()


def test_the_optimised_model_fails(ort_moe: Command, source: Path, tmp_path: Path) -> None:
    """What was measured is shown and drawn, and the exit code tells of the rest."""
    plot = tmp_path / "plot.png"
    model = fused()
    for node in model.graph.node:
        node.domain = "nowhere"
    outcome = ort_moe("bench", source, save(model, tmp_path / "broken.onnx"), *QUICK, "--tokens", "1", "--plot", plot)
    assert outcome.code == ExitCode.ERROR
    assert "as given" in outcome.out
    assert "nowhere" in outcome.out
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tokens", "1,none"), "numbers above 0 are expected"),
        (("--tokens", "0"), "numbers above 0 are expected"),
        (("--tokens", ""), "numbers above 0 are expected"),
        (("--steps", "0"), "--steps"),
        (("--past", "-1"), "--past"),
        (("--weights", "int3"), "the format 'int3' is unknown; there are keep, nvfp4"),
        (("--plot", "plot.svg"), "'plot.svg' does not end in .png"),
        (("--provider", "tpu"), "--provider"),
    ],
)
def test_usage(ort_moe: Command, source: Path, arguments: tuple[str, ...], sentence: str) -> None:
    outcome = ort_moe("bench", source, *arguments)
    assert outcome.code == ExitCode.USAGE
    assert sentence in " ".join(outcome.err.replace("│", " ").split())


def test_formats_of_a_model_that_is_made(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("bench", source, source, "--weights", "int8")
    assert outcome.code == ExitCode.USAGE
    assert "OPT is made" in outcome.err


def test_unfit(ort_moe: Command, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    outcome = ort_moe("bench", source, "--provider", "cuda")
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert "this ONNX Runtime has no CUDAExecutionProvider" in outcome.err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    outcome = ort_moe("bench", source, "--plot", source.with_name("plot.png"))
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert "plots need matplotlib, install ort-moe[plot]" in outcome.err


def test_without_a_runtime(ort_moe: Command, source: Path, no_onnxruntime: None) -> None:
    outcome = ort_moe("bench", source)
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert "no ONNX Runtime is installed" in outcome.err


def test_no_model(ort_moe: Command, tmp_path: Path) -> None:
    outcome = ort_moe("bench", tmp_path / "missing.onnx")
    assert outcome.code == ExitCode.ERROR
    assert outcome.err == f"ort-moe: error: cannot read {tmp_path / 'missing.onnx'}: No such file or directory\n"
