"""Quantized checkpoints are read as what their codes stand for, and are exported so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ort_moe
from ort_moe.exporting.export import export
from ort_moe.packing import mxfp4

pytestmark = pytest.mark.export

BLOCK = 8


def split(name: str, tensor: Any) -> tuple[dict[str, Any], Any]:
    """A weight as its checkpoint has it, and what that stands for."""
    import torch

    if name.endswith(("gate_up_proj", "down_proj")):  # GPT-OSS: (E, D, N), packed along D
        packed = mxfp4.quantize(tensor.float().numpy().transpose(0, 2, 1).copy())
        experts, rows, nbytes = packed.weights.shape
        parts = {
            f"{name}_blocks": torch.from_numpy(packed.weights.reshape(experts, rows, nbytes // 16, 16).copy()),
            f"{name}_scales": torch.from_numpy(packed.scales.view(np.uint8).copy()),
        }
        return parts, torch.from_numpy(mxfp4.dequantize(packed).transpose(0, 2, 1).copy()).to(tensor.dtype)
    rows, depth = tensor.shape  # one expert's, or a layer of attention
    blocks = tensor.float().numpy().reshape(rows // BLOCK, BLOCK, depth // BLOCK, BLOCK)
    scales = np.abs(blocks).max((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    parts = {
        name: torch.from_numpy(codes.reshape(rows, depth).view(np.uint8)).view(torch.float8_e4m3fn),
        f"{name}_scale_inv": torch.from_numpy(scales),
    }
    meant = codes.astype(np.float32) * scales[:, None, :, None]
    return parts, torch.from_numpy(meant.reshape(rows, depth)).to(tensor.dtype)


@pytest.mark.parametrize(
    ("architecture", "sizes", "quantization", "ending"),
    [
        ("gpt_oss", {"hidden_size": 64, "intermediate_size": 32}, {"quant_method": "mxfp4"}, "_proj"),
        (
            "qwen3_moe",
            {},
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
            "_proj.weight",
        ),
    ],
    ids=["mxfp4", "fp8"],
)
def test_export(
    tmp_path: Path, architecture: str, sizes: dict[str, int], quantization: dict[str, Any], ending: str
) -> None:
    from safetensors.torch import load_file, save_file

    from models.checkpoint import write_checkpoint

    folders = [tmp_path / "quantized", tmp_path / "meant"]
    for folder in folders:
        write_checkpoint(architecture, folder, precision="bf16", **sizes)
    tensors = load_file(folders[0] / "model.safetensors")
    quantized, meant = dict(tensors), dict(tensors)
    names = [name for name in tensors if name.endswith(ending)]
    assert names
    for name in names:
        parts, meant[name] = split(name, quantized.pop(name))
        quantized |= parts
    for folder, stored in zip(folders, (quantized, meant), strict=True):
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = folders[0] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantization}))
    done = [export(folder, tmp_path / f"{folder.name}_out", max_length=8) for folder in folders]
    assert [each.precision for each in done] == ["bf16", "bf16"]
    first, second = ((Path(each.output) / "weights.data").read_bytes() for each in done)
    assert first == second
    report = ort_moe.optimize(done[0].decode)
    assert [site.status for site in (*report.sites, *report.experts)] == ["whole"] * 4
