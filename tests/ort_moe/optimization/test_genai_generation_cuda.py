"""onnxruntime-genai on CUDA generates the same tokens from what `optimize` makes of its builder's folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ort_moe
from ort_moe.optimization.folder_report import FolderReport
from tests.genai_models import generate

pytestmark = [pytest.mark.gpu, pytest.mark.export]

PROMPTS = ([44, 3, 90], [(7 * i) % 93 + 3 for i in range(40)])
"""None meets a near tie, which may go either way in half precision: a prompt of five tokens does at the fourth."""
LENGTH = 64


def _optimize(source: Path, output: Path) -> Path:
    """Fuses all that there is; the CPU cannot verify what CUDA alone runs, so that is done there."""
    report = ort_moe.optimize(source, output, verify=False)
    assert isinstance(report, FolderReport)
    (model,) = report.models
    assert [experts.block for experts in model.experts] == ["whole"] * 2
    assert [site.status for site in model.sites] == ["whole"] * 2
    return output


def _capture(folder: Path) -> None:
    """Has onnxruntime-genai capture a CUDA graph of the decode steps."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    (provider,) = config["model"]["decoder"]["session_options"]["provider_options"]
    assert provider["cuda"]["enable_cuda_graph"] == "0"
    provider["cuda"]["enable_cuda_graph"] = "1"
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("precision", ["fp16", "int4"])
@pytest.mark.parametrize("architecture", ["gpt_oss", "lfm2_moe"])
def test_the_same_tokens(genai_folders: Callable[..., Path], architecture: str, precision: str, tmp_path: Path) -> None:
    source = genai_folders(architecture, precision, provider="cuda")
    expected = generate(source, PROMPTS, LENGTH)
    assert all(len(set(tokens)) > 8 for tokens in expected)
    assert generate(_optimize(source, tmp_path / "out"), PROMPTS, LENGTH) == expected


def test_verified(genai_folders: Callable[..., Path], tmp_path: Path) -> None:
    """Not GPT-OSS: CUDA's GroupQueryAttention refuses the past of a window that slides as verification feeds it."""
    source = genai_folders("lfm2_moe", "fp16", provider="cuda")
    output = _optimize(source, tmp_path / "out")
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert ort_moe.verify(source / "model.onnx", output / "model.onnx", providers=providers).passed


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_in_a_cuda_graph(genai_folders: Callable[..., Path], precision: str, tmp_path: Path) -> None:
    """As without one, as far as the original does: behind a prompt longer than its window it writes other tokens."""
    source = genai_folders("gpt_oss", precision, provider="cuda")
    output = _optimize(source, tmp_path / "out")
    expected = generate(output, PROMPTS[:1], LENGTH)
    _capture(output)
    assert generate(output, PROMPTS[:1], LENGTH) == expected
