"""onnxruntime-genai loads what `optimize` makes of its builder's folders, and generates the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ort_moe.folder_report import FolderReport
from ort_moe.library import NAME
from ort_moe.optimization import optimize
from tests.genai_folders import contents

pytestmark = pytest.mark.export

PROMPTS = ([5, 17, 33, 8, 60], [(7 * i) % 93 + 3 for i in range(40)])
"""One shorter and one longer than the window of attention that slides."""


def _optimize(*arguments: Any, **options: Any) -> FolderReport:
    report = optimize(*arguments, **options)
    assert isinstance(report, FolderReport)
    return report


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds a folder, once."""
    from tests.genai_models import build

    root, built = tmp_path_factory.mktemp("genai"), {}

    def folder(architecture: str, precision: str) -> Path:
        key = f"{architecture}_{precision}"
        if key not in built:
            built[key] = build(architecture, precision, root / key)
        return built[key]

    return folder


@pytest.mark.parametrize(
    ("architecture", "precision"),
    [("gpt_oss", "fp32"), ("gpt_oss", "int4"), ("lfm2_moe", "fp32"), ("lfm2_moe", "int4")],
)
def test_the_same_tokens(folders: Any, architecture: str, precision: str, tmp_path: Path) -> None:
    from tests.genai_models import generate

    source, output = folders(architecture, precision), tmp_path / "out"
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


def test_by_the_library_in_the_folder(folders: Any, tmp_path: Path) -> None:
    """Wherever the folder is moved; and not without it."""
    from tests.genai_models import generate

    source = folders("gpt_oss", "fp32")
    _optimize(source, tmp_path / "out")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert generate(moved, PROMPTS) == generate(source, PROMPTS)
    (moved / NAME).unlink()
    with pytest.raises(RuntimeError, match=f"Failed to load library {NAME}"):
        generate(moved, PROMPTS)


def test_packed_weights(folders: Any, tmp_path: Path) -> None:
    from tests.genai_models import generate

    report = _optimize(folders("gpt_oss", "fp32"), tmp_path / "out", weights="int8", block_size=32)
    assert report.models[0].conversions
    assert [len(tokens) for tokens in generate(tmp_path / "out", PROMPTS)] == [64, 64]


def test_integers_for_the_cpu_are_none_for_cuda(folders: Any) -> None:
    source = folders("lfm2_moe", "int4")
    assert _optimize(source).target == "cpu"
    report = _optimize(source, target="cuda")
    assert not report.matched
    assert {finding.reason.code for experts in report.models[0].experts for finding in experts.findings} == {"OM021"}


def test_shared_experts(folders: Any) -> None:
    """Qwen3.5's blocks are fused, though the CPU's kernels do not take its positions, before or after."""
    (model,) = _optimize(folders("qwen3_5_moe", "int4")).models
    assert [experts.block for experts in model.experts] == ["whole"] * 2
