"""FusedExperts on the CPU against the exported graph and ONNX Runtime's contrib ops, on the same layers in one run.

    python -m benchmarks.experts_cpu [--json OUT] [--tokens 1 64] [--only nvfp4] [--threads 2]

Each layer is a router and its experts in float32, behind the router's product. Peers: the layer as exporters write it
(`exported_layer`), and MoE and QMoE. Times in ms of a whole run of a session: every draw of rows and logits is run
several times, ours and the peer's in turn and between runs of the other draws, which choose other experts; of each
draw the fastest run counts, for other programs only add to it, and of the draws the median. Answers are held against
each other.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto

from benchmarks.expert_models import Model, Shape, global_scale, stack_model
from benchmarks.exported_layer import copied_bytes, exported_model
from benchmarks.output import add_json, publish
from ort_moe.benchmarking.machine import processor
from ort_moe.installation.library import register

TOKENS = (1, 4, 16, 64, 256)
EXPORTED = "exported graph"
DENSE = Shape(32, 8, 1024, 512, "dense", "float")
LAYERS = (
    (DENSE, EXPORTED),
    (DENSE, "MoE"),
    (Shape(128, 8, 2048, 768, "nvfp4", "float"), "QMoE"),
    (Shape(512, 10, 2560, 640, "nvfp4", "float"), "QMoE"),
    (Shape(128, 8, 2048, 768, "int4", "float", 32), "QMoE"),
)
"""Layers and their peers."""

DRAWS, REPEATS = 5, 5
MAX_COPIED_BYTES = 4 << 30  # of the exported graph, which takes them again for a second layer
TOLERANCE = 1e-4  # of the difference's norm beside the result's

Array = npt.NDArray[Any]
Values = Mapping[str, Array]


def random_weights(shape: Shape) -> dict[str, Array]:
    """The experts' weights by name, as arrays of their bits."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {}
    for name, (kind, dims) in shape.weights().items():
        depth = shape.hidden if name.startswith("fc1") else shape.inner
        if name.endswith("_global_scale"):
            weights[name] = np.full(dims, global_scale(depth), np.float32)
        elif kind == TensorProto.FLOAT8E4M3FN:
            weights[name] = rng.integers(0x30, 0x41, dims, np.uint8)  # 0.5 to 2.25
        elif kind == TensorProto.UINT8:
            weights[name] = rng.integers(0, 256, dims, np.uint8)
        elif name.endswith("_scales"):
            weights[name] = rng.uniform(0.1, 0.3, dims).astype(np.float32) * np.float32(depth**-0.5)
        else:
            weights[name] = rng.standard_normal(dims, np.float32) * np.float32(depth**-0.5)
    return weights


def draws(shape: Shape, tokens: int) -> list[dict[str, Array]]:
    """Rows and logits."""
    rng = np.random.default_rng(tokens)
    return [
        {
            "x0": rng.standard_normal((tokens, shape.hidden), np.float32),
            "logits0": rng.standard_normal((tokens, shape.experts), np.float32),
        }
        for _ in range(DRAWS)
    ]


class Layer:
    """A session of a model whose weights lie where they are."""

    def __init__(self, model: Model, weights: Values, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        register(options)
        model.add_constants(options, {name: weights[name].reshape(dims) for name, (_, dims) in model.constants.items()})
        self._session = onnxruntime.InferenceSession(
            model.proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = model.inputs
        self._weights = {name: self._value(name, array) for name, array in weights.items() if name in model.inputs}

    def _value(self, name: str, array: Array) -> Any:
        kind, dims = self._inputs[name]
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.reshape([-1 if isinstance(size, str) else size for size in dims]), kind
        )

    def run(self, values: Values) -> tuple[Array, float]:
        """The rows, (T, H), and the run's time in ms."""
        feeds = self._weights | {name: self._value(name, array) for name, array in values.items()}
        start = time.perf_counter()
        (y,) = self._session.run_with_ort_values(["y0"], feeds)
        ms = (time.perf_counter() - start) * 1e3
        rows: Array = y.numpy()
        return rows.reshape(len(values["x0"]), -1), ms


def peer_layer(shape: Shape, peer: str, weights: Values, threads: int) -> Layer:
    """A session of the peer's."""
    if peer == EXPORTED:
        fc1 = weights["fc1_weights"]
        apart = {"fc1": np.concatenate([fc1[:, 0::2], fc1[:, 1::2]], axis=1), "fc2": weights["fc2_weights"]}
        return Layer(exported_model(shape), apart, threads)
    prepacked = shape.weight_format == "nvfp4"
    return Layer(stack_model(shape, "T", 1, contrib=True, weights_prepacked=prepacked), weights, threads)


def measure(shape: Shape, peer: str, tokens: Sequence[int], threads: int) -> list[dict[str, Any]]:
    """The rows of a layer."""
    weights = random_weights(shape)
    ours = Layer(stack_model(shape, "T", 1, contrib=False), weights, threads)
    theirs = peer_layer(shape, peer, weights, threads)
    rows = []
    for count in tokens:
        sides = {"ours": ours.run}
        if peer != EXPORTED or copied_bytes(shape, count) <= MAX_COPIED_BYTES:
            sides["peer"] = theirs.run
        ms = times(sides, draws(shape, count))
        row: dict[str, Any] = {"shape": shape.name, "tokens": count, "ours_ms": round(ms["ours"], 3), "peer": peer}
        row["peer_ms"] = round(ms["peer"], 3) if "peer" in ms else None
        row["ratio_to_peer"] = round(ms["ours"] / ms["peer"], 2) if "peer" in ms else None
        rows.append(row)
    return rows


def times(sides: Mapping[str, Callable[[Values], tuple[Array, float]]], values: Sequence[Values]) -> dict[str, float]:
    """Of each side: the median over the draws of the fastest run.

    Raises:
        AssertionError: The sides differ.
    """
    fastest = {name: [math.inf] * len(values) for name in sides}
    for _ in range(REPEATS):
        for n, draw in enumerate(values):
            answers = {}
            for name, run in sides.items():
                answers[name], ms = run(draw)
                fastest[name][n] = min(fastest[name][n], ms)
            first, *others = answers.values()
            for other in others:
                difference = np.linalg.norm(first - other) / np.linalg.norm(other)
                if not difference < TOLERANCE:
                    raise AssertionError(f"ours differs from the peer's by {difference:.1e} of its norm")
    return {name: statistics.median(of_draws) for name, of_draws in fastest.items()}


def environment(threads: int) -> dict[str, Any]:
    """What the results are worth little without."""
    said = processor()
    flags = said.get("flags", "").split()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": said.get("model name", "unknown"),
        "vectors": next((name for name in ("avx512f", "avx2") if name in flags), "none"),
        "threads": threads,
        "onnxruntime": onnxruntime.__version__,
    }


COLUMNS = {
    "layer": "shape",
    "T": "tokens",
    "ours": "ours_ms",
    "peer": "peer_ms",
    "": "peer",
    "ours/peer": "ratio_to_peer",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only", help="layers whose name, or whose peer's, contains this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all processors")
    args = parser.parse_args()
    rows = [
        row
        for shape, peer in LAYERS
        if args.only is None or args.only in f"{shape.name} {peer}"
        for row in measure(shape, peer, args.tokens, args.threads)
    ]
    publish(rows, COLUMNS, environment(args.threads), args.json)


if __name__ == "__main__":
    main()
