"""Optimising a model larger than memory: what is held of its weights, measured.

Pages of mapped files count as resident, but the system takes them back whenever it needs memory; what is measured is
anonymous memory, which it cannot take back (`RssAnon` in /proc/PID/status, read every few milliseconds), above that of
a process that has only imported what it needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ort_moe
from ort_moe.files.loading import data_files, load_model
from ort_moe.installation.library import library_path
from tests.ort_moe.large_models import LargeModel

MIB = 1 << 20
MODEL = LargeModel()

CODE = """
import sys
root, source, output, verify, weights = sys.argv[1:]
sys.path.insert(0, root)
sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import onnx, onnxruntime, ort_moe, ort_moe.rewrites, ort_moe.verification
from ort_moe.optimization.optimize import optimize
print("imported", flush=True)
sys.stdin.readline()
optimize(source, output, verify=bool(int(verify)), weights=weights)
"""
"""The import hook of an editable install goes, so that what runs is what is tested."""


def _anonymous(process: int) -> int:
    """Bytes of anonymous memory of a process; 0 after its end."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon")), 0)


LOADING = """
import os, sys
path = sys.argv[1]
import onnxruntime
print("imported", flush=True)
sys.stdin.readline()
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
print("loaded", flush=True)
"""


def added_by(code: str, *arguments: object) -> int:
    """Bytes of anonymous memory that code adds at its peak, once it has imported what it needs and said so."""
    environment = {**os.environ, "ORT_MOE_LIBRARY": os.fspath(library_path())}
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "imported\n"
        before = peak = _anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None:
            peak = max(peak, _anonymous(child.pid))
            time.sleep(0.002)
    assert child.returncode == 0
    assert before
    return peak - before


def added_memory(source: Path, output: Path, *, verify: bool, weights: str = "keep") -> int:
    """Bytes of anonymous memory that an optimisation adds at its peak."""
    return added_by(CODE, Path(ort_moe.__file__).parent.parent, source, output, int(verify), weights)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("large") / "model.onnx")


def test_kept_weights_are_not_held(large: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.onnx"
    added = added_memory(large, output, verify=False)
    assert added < 64 * MIB, f"{added / MIB:.0f} MiB for {MODEL.weight_bytes / MIB:.0f} MiB of weights"
    assert sorted(data_files(load_model(output))) == ["out.onnx.data", "weights.bin"]
    # Plain ONNX Runtime, too, which inlines the functions, holds none as it loads the model.
    assert added_by(LOADING, output) < 16 * MIB


def test_verification_holds_no_copy_of_the_weights(large: Path) -> None:
    output = large.with_name("out.onnx")
    added = added_memory(large, output, verify=True)
    assert added < 300 * MIB, f"{added / MIB:.0f} MiB for {MODEL.weight_bytes / MIB:.0f} MiB of weights"
    assert sorted(path.name for path in large.parent.iterdir()) == [
        *("model.onnx", "out.onnx", "out.onnx.data", "weights.bin")
    ]


def test_packed_weights_are_not_held(tmp_path: Path) -> None:
    model, output = LargeModel(layers=2, experts=12), tmp_path / "out.onnx"
    added = added_memory(model.write(tmp_path / "model.onnx"), output, verify=False, weights="nvfp4")
    packed = output.with_name("out.onnx.data").stat().st_size
    assert 0.28 * model.weight_bytes < packed < 0.29 * model.weight_bytes
    # What is held of the weights of the one expert that is being packed.
    assert added < 48 * MIB, f"{added / MIB:.0f} MiB for {model.weight_bytes / MIB:.0f} MiB of weights"
    # Plain ONNX Runtime inlines the functions; only the scales of nvfp4 are widened as it loads the model.
    assert added_by(LOADING, output) < 16 * MIB
