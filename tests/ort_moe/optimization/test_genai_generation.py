"""onnxruntime-genai loads what `optimize` makes of its builder's folders, and generates the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ort_moe.installation.library import NAME
from ort_moe.optimization.folder_report import FolderReport
from ort_moe.optimization.optimize import optimize
from tests.genai_folders import contents

pytestmark = pytest.mark.export

PROMPTS = ([5, 17, 33, 8, 60], [(7 * i) % 93 + 3 for i in range(40)])
"""One shorter and one longer than the window of attention that slides."""


def _optimize(*arguments: Any, **options: Any) -> FolderReport:
    report = optimize(*arguments, **options)
    assert isinstance(report, FolderReport)
    return report


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("gpt_oss", "fp32"), ("gpt_oss", "int4"), ("lfm2_moe", "fp32"), ("lfm2_moe", "int4")],
)
def test_the_same_tokens(genai_folders: Callable[..., Path], architecture: str, precision: str, tmp_path: Path) -> None:
    from tests.genai_models import generate

    source, output = genai_folders(architecture, precision), tmp_path / "out"
    before = contents(source)
    expected = generate(source, PROMPTS)
    assert all(len(set(tokens)) > 10 for tokens in expected)
    report = _optimize(source, output)
    (model,) = report.models
    assert [experts.block for experts in model.experts] == ["whole"] * 2
    assert [site.status for site in model.sites] == ["whole"] * 2
    assert model.verification is not None
    assert {shape.status for shape in model.verification.shapes} == {"passed"}
    assert any(shape.shape.past for shape in model.verification.shapes)
    assert contents(source) == before
    assert generate(output, PROMPTS) == expected


def test_by_the_library_in_the_folder(genai_folders: Callable[..., Path], tmp_path: Path) -> None:
    """Wherever the folder is moved; and not without it."""
    from tests.genai_models import generate

    source = genai_folders("gpt_oss", "fp32")
    _optimize(source, tmp_path / "out")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert generate(moved, PROMPTS) == generate(source, PROMPTS)
    (moved / NAME).unlink()
    with pytest.raises(RuntimeError, match=f"Failed to load library {NAME}"):
        generate(moved, PROMPTS)


def test_packed_weights(genai_folders: Callable[..., Path], tmp_path: Path) -> None:
    from tests.genai_models import generate

    report = _optimize(genai_folders("gpt_oss", "fp32"), tmp_path / "out", weights="int8", block_size=32)
    assert report.models[0].conversions
    assert [len(tokens) for tokens in generate(tmp_path / "out", PROMPTS)] == [64, 64]


def test_integers_for_the_cpu_are_none_for_cuda(genai_folders: Callable[..., Path]) -> None:
    source = genai_folders("lfm2_moe", "int4")
    assert _optimize(source).target == "cpu"
    report = _optimize(source, target="cuda")
    assert not report.matched
    assert {finding.reason.code for experts in report.models[0].experts for finding in experts.findings} == {"OM021"}


def test_shared_experts(genai_folders: Callable[..., Path]) -> None:
    """Qwen3.5's blocks are fused, though the CPU's kernels do not take its positions, before or after."""
    (model,) = _optimize(genai_folders("qwen3_5_moe", "int4")).models
    assert [experts.block for experts in model.experts] == ["whole"] * 2
