"""ort-moe verify."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest

from ort_moe.cli.exit_codes import ExitCode
from tests.ort_moe.cli.conftest import Command
from tests.ort_moe.tiny_models import fused, save


def test_passed(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("verify", source, save(fused(), source.with_name("right.onnx")))
    assert outcome.code == ExitCode.DONE
    assert outcome.out.splitlines()[-1] == "PASSED"


def test_failed(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("verify", source, save(fused(wrong="weights"), source.with_name("wrong.onnx")))
    assert outcome.code == ExitCode.VERIFICATION_FAILED
    assert "FAILED: the first router that differs is router" in outcome.out


def test_models_of_other_lengths(ort_moe: Command, source: Path) -> None:
    """Such as a prefill graph and an optimised decode graph, whose inputs have the same names."""
    outcome = ort_moe("verify", source, save(fused(tokens=1), source.with_name("decode.onnx")))
    assert outcome.code == ExitCode.VERIFICATION_FAILED
    (told,) = [line for line in outcome.out.splitlines() if line.startswith("FAILED: ")]
    assert "decode.onnx: Got invalid dimensions for input: hidden" in told
    assert "Expected: 1" in told


def test_json(ort_moe: Command, source: Path) -> None:
    outcome = ort_moe("verify", source, save(fused(wrong="weights"), source.with_name("wrong.onnx")), "--json")
    assert outcome.code == ExitCode.VERIFICATION_FAILED
    assert json.loads(outcome.out)["passed"] is False
    assert "FAILED" in outcome.err


def test_without_a_runtime(ort_moe: Command, source: Path, no_onnxruntime: None) -> None:
    outcome = ort_moe("verify", source, source)
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert "no ONNX Runtime is installed" in outcome.err


def test_on_a_provider_that_is_not_there(ort_moe: Command, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    outcome = ort_moe("verify", source, source, "--provider", "cuda")
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert "this ONNX Runtime has no CUDAExecutionProvider" in outcome.err
    assert ort_moe("verify", source, source, "--provider", "tpu").code == ExitCode.USAGE
