"""MoE layers of Qwen3-30B-A3B from file to answer: as exported, with ONNX Runtime's contrib nodes, and with ours.

    python -m benchmarks.end_to_end [--json OUT] [--plot OUT.png] [--provider cpu] [--layers 4] [--geometry E/K/H/I]

Four layers of `exported_stack` are written with random weights in float16, 4.8 GB, and handed to `ort_moe.bench`, which
is `ort-moe bench`: a decode step and a prefill of 512 tokens, our nodes with dense weights and with nvfp4. Disk for
three such models is taken in the temporary folder (TMPDIR) at a time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ort_moe
from benchmarks.expert_models import Shape
from benchmarks.exported_stack import FIXTURES, write_exported_stack
from benchmarks.gpu_state import gpu_state
from benchmarks.output import add_json, write_json
from ort_moe.benchmarking import Benchmark
from ort_moe.benchmarking.plot import check_plot, write_plot
from ort_moe.printing.wording import counted
from ort_moe.running.session import CPU, CUDA

GEOMETRY = (128, 8, 2048, 768)
"""E, K, H and I of Qwen3-30B-A3B."""

LAYERS = 4
TOKENS = (1, 512)
WEIGHTS = ("keep", "nvfp4")


def measure(shape: Shape, layers: int, **options: Any) -> tuple[Benchmark, float]:
    """Writes the model, measures it, and says how long both took in seconds; the model is called by its shape."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ort-moe-") as folder:
        path = Path(folder, "exported.onnx")
        write_exported_stack(shape, layers, path)
        result = ort_moe.bench(path, **options)
    name = f"{counted(layers, 'layer')} of {shape.name}"
    variants = tuple(replace(variant, model=None) for variant in result.variants)
    return replace(result, source=name, variants=variants), time.perf_counter() - began


def geometry(text: str) -> tuple[int, int, int, int]:
    """`128/8/2048/768` as E, K, H and I."""
    experts, k, hidden, inner = (int(part) for part in text.split("/"))
    return experts, k, hidden, inner


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw them")
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--geometry", type=geometry, default=GEOMETRY, metavar="E/K/H/I")
    parser.add_argument("--dtype", choices=FIXTURES, default="float16")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--weights", nargs="+", default=WEIGHTS)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if args.plot is not None:
        check_plot(args.plot, source="exported.onnx")
    result, seconds = measure(
        Shape(*args.geometry, "dense", args.dtype),
        args.layers,
        providers=[CUDA if args.provider == "cuda" else CPU],
        tokens=tuple(args.tokens),
        steps=args.steps,
        weights=tuple(args.weights),
    )
    print(result)
    print(f"{seconds:.0f} s in all, with writing the models")
    if args.json is not None:
        machine = gpu_state() if args.provider == "cuda" else {}
        document = {"environment": {"date": time.strftime("%Y-%m-%d"), **machine}, **result.to_dict()}
        write_json(document, args.json)
    if args.plot is not None:
        write_plot(result, args.plot, model=result.source)


if __name__ == "__main__":
    main()
