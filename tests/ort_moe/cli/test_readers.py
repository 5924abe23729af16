"""The verbs that only read: inspect, explain, doctor, ops, rules."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from ort_moe.cli.exit_codes import ExitCode
from ort_moe.ops import OPS
from ort_moe.rewrites import RULES
from tests.contrib_models import ContribCase
from tests.ort_moe.cli.conftest import Command
from tests.ort_moe.conftest import SetWheels
from tests.ort_moe.tiny_models import fused, save


def test_inspect(ort_moe: Command, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = ort_moe("inspect", source)
    assert outcome.code == ExitCode.DONE
    assert "softmax, top 2" in outcome.out
    document = json.loads(ort_moe("inspect", source, "--json").out)
    assert document["layers"][0]["experts"] == 16


def test_inspect_two(ort_moe: Command, source: Path) -> None:
    other = save(fused(), source.with_name("other.onnx"))
    assert "ort_moe::FusedRouter" in ort_moe("inspect", source, other).out
    document = json.loads(ort_moe("inspect", source, other, "--json").out)
    assert document["operators"]["TopK"] == {"before": 1, "after": 0}


def test_width_of_a_pipe(ort_moe: Command, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, ort_moe("rules").out.splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, ort_moe("rules").out.splitlines())) <= 80


def test_explain(ort_moe: Command, source: Path, classifier: Path) -> None:
    assert "fused whole" in ort_moe("explain", source).out
    outcome = ort_moe("explain", classifier)
    assert outcome.code == ExitCode.DONE
    assert "OM001 topk-not-a-router" in outcome.out
    assert "what to do: Nothing" in outcome.out
    document = json.loads(ort_moe("explain", classifier, "--json").out)
    assert document["sites"][0]["findings"][0]["code"] == "OM001"


def test_explain_layer(ort_moe: Command, source: Path) -> None:
    assert ort_moe("explain", source, "--layer", 0).code == ExitCode.DONE
    outcome = ort_moe("explain", source, "--layer", 1)
    assert outcome.code == ExitCode.USAGE
    assert "there is no site 1: there are 1" in outcome.err


def test_explain_for_a_target(ort_moe: Command, tmp_path: Path) -> None:
    onnx.save(ContribCase(weight_format="fp8", dtype="float16").model(), tmp_path / "qmoe.onnx")
    left = ort_moe("explain", tmp_path / "qmoe.onnx").out
    assert "moe makes the choice itself" in left
    assert "OM023 contrib-is-faster" in left
    assert "nothing to fuse" not in left
    assert "weights in fp8" in ort_moe("explain", tmp_path / "qmoe.onnx", "--target", "cpu").out


def test_doctor(ort_moe: Command) -> None:
    outcome = ort_moe("doctor")
    assert outcome.code == ExitCode.DONE, outcome.out
    assert outcome.out.splitlines()[-1] == "fit"


def test_doctor_unfit(ort_moe: Command, set_wheels: SetWheels) -> None:
    set_wheels(onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    outcome = ort_moe("doctor", "--json")
    assert outcome.code == ExitCode.ENVIRONMENT_UNFIT
    assert json.loads(outcome.out)["fit"] is False
    assert "unfit: wheels" in outcome.err


def test_ops(ort_moe: Command) -> None:
    listing = ort_moe("ops").out
    for op in OPS.values():
        assert op.name in listing
        page = ort_moe("ops", op.name).out
        assert all(attribute.name in page for attribute in op.attributes)
        assert all(t.shape in page for t in op.outputs)  # no markup has eaten a shape
        assert "\n\nInputs\n" in page
        assert "\n\n\nInputs\n" not in page


def test_rules(ort_moe: Command) -> None:
    listing = ort_moe("rules").out
    for rule in RULES.values():
        assert rule.name in listing
    page = ort_moe("rules", "softmax").out
    assert RULES["softmax"].identity in " ".join(page.split())
