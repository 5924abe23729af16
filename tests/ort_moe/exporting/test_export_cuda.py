"""Tiny models, exported and decoded on CUDA: replays have the bits of plain runs, and write PyTorch's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import ort_moe
from tests.ort_moe.exporting.test_export import ARCHITECTURES, Exported, checkpoint, decode_loop_text, exported

pytestmark = [pytest.mark.export, pytest.mark.gpu]

__all__ = ["exported"]

STEPS = 256


def cuda_session(path: Path | str, *, graph: bool) -> ort.InferenceSession:
    options = {"enable_cuda_graph": "1" if graph else "0", "use_tf32": "0"}
    return ort_moe.session(path, providers=[("CUDAExecutionProvider", options), "CPUExecutionProvider"])


def check_replays(decode: Path | str, fused: Path) -> None:
    """As many as the cache holds; the plain runs read one cache and write another."""
    ort_moe.optimize(decode, fused)
    plain, loop = cuda_session(fused, graph=False), ort_moe.DecodeLoop(cuda_session(fused, graph=True))
    assert loop.captures
    assert not loop.copied_state
    names = [output.name for output in plain.get_outputs()]
    state = loop.read_state()
    ids = np.random.default_rng(0).integers(0, 32, (STEPS, 2, 1))
    for position, tokens in enumerate(ids):
        inputs = {"input_ids": tokens, "position_ids": np.full((2, 1), position)}
        outputs = dict(zip(names, plain.run(names, inputs | state), strict=True))
        state = {past: outputs[present] for past, present in loop.state.items()}
        logits = loop.step(**inputs)["logits"]
        np.testing.assert_array_equal(logits.view(np.uint8), outputs["logits"].view(np.uint8), f"step {position}")
    for name, value in loop.read_state().items():
        np.testing.assert_array_equal(value.view(np.uint8), state[name].view(np.uint8), name)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replays_are_plain_runs(architecture: str, precision: str, tmp_path: Path) -> None:
    checkpoint(architecture, tmp_path / "model", max_position_embeddings=STEPS, **ARCHITECTURES[architecture])
    done = ort_moe.export(
        tmp_path / "model", tmp_path / "out", batch=2, max_length=STEPS, precision=precision, verify=False
    )
    check_replays(done.decode, tmp_path / "fused.onnx")


def test_text_is_pytorchs(exported: Exported, tmp_path: Path) -> None:
    """Before and after `optimize`."""
    fused = []
    for path in (exported.export.prefill, exported.export.decode):
        ort_moe.optimize(path, tmp_path / Path(path).name)
        fused.append(tmp_path / Path(path).name)
    for prefill, decode in ((exported.export.prefill, exported.export.decode), fused):
        loop = ort_moe.DecodeLoop(cuda_session(decode, graph=True))
        assert decode_loop_text(cuda_session(prefill, graph=False), loop) == exported.text
