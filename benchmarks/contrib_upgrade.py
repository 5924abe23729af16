"""Models of ONNX Runtime's contrib ops as they are, and as `ort_moe.optimize` makes them, side by side on a GPU.

    python -m benchmarks.contrib_upgrade [--json OUT] [--tokens 1 4 1024] [--only nvfp4]

A model is a stack of layers as MoE or QMoE nodes, each with weights of its own, in a file with external data. It is
optimised file to file; both files then run in sessions with CUDA graphs, on the same rows. us per layer: host time of a
run divided by the layers. The difference is that of the answers, in norm; `seconds` is what the optimisation took.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

import ort_moe
from benchmarks import command, timing
from benchmarks.expert_models import Shape, stack_model
from benchmarks.expert_sessions import relative_difference
from benchmarks.expert_stack import Experts, Stack
from benchmarks.experts import STACK_TOLERANCE

LAYERS = 2
TOKENS = (1, 4, 1024)
SHAPES = (
    Shape(32, 4, 2048, 768, "dense"),
    Shape(32, 4, 2048, 768, "nvfp4"),
    Shape(32, 4, 2048, 768, "mxfp4"),
    Shape(32, 4, 2048, 768, "int4", "float16", 32),
    Shape(32, 4, 2048, 768, "int8", "float16", 128),
)


class Side:
    """A session of a model file, for any number of tokens; each has a CUDA graph of its own."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        ort_moe.register(options)
        provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
        self._session = onnxruntime.InferenceSession(path, options, providers=[provider])
        self._graphs = itertools.count(1)

    def runner(self, stack: Stack) -> Callable[[], None]:
        """Runs the session on a stack's tensors."""
        binding, tensors, kind = self._session.io_binding(), stack.tensors(), stack.shape.element_type
        for bind, values in (
            (binding.bind_input, self._session.get_inputs()),
            (binding.bind_output, self._session.get_outputs()),
        ):
            for value in values:
                tensor = tensors[value.name]
                bind(value.name, "cuda", 0, kind, tuple(tensor.shape), tensor.data_ptr())
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(next(self._graphs)))
        return lambda: self._session.run_with_iobinding(binding, options)


def write_contrib(experts: Experts, path: Path) -> None:
    """Writes a stack of contrib nodes with its weights in a file beside it, the same values for every layer."""
    shape = experts.shape
    proto = stack_model(shape, "T", LAYERS, contrib=True).proto
    declared = shape.weights(packed_for="QMoE") if shape.contrib == "QMoE" else shape.weights()
    values = experts.for_qmoe
    activations = [value for value in proto.graph.input if value.name not in declared]
    del proto.graph.input[:], proto.graph.initializer[:]
    proto.graph.input.extend(activations)
    for n, node in enumerate(proto.graph.node):  # weights that layers share would be left as they are
        node.input[:] = [f"{name}_of_{n}" if name in declared else name for name in node.input]
        for name, (kind, dims) in declared.items():
            proto.graph.initializer.append(
                onnx.TensorProto(name=f"{name}_of_{n}", data_type=kind, dims=dims, raw_data=values[name].tobytes())
            )
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}.data")


@cache
def sides(shape: Shape) -> tuple[Experts, Side, Side, float]:
    """The experts, the contrib model's session, that of the model made of it, and the seconds that took."""
    experts = Experts(shape)
    with tempfile.TemporaryDirectory() as folder:
        contrib, upgraded = Path(folder, "contrib.onnx"), Path(folder, "upgraded.onnx")
        write_contrib(experts, contrib)
        began = time.perf_counter()
        # Whatever is known of speeds: they are measured here.
        report = ort_moe.optimize(contrib, upgraded, target="cpu", verify=False)
        seconds = time.perf_counter() - began
        if report.operators_after.get("ort_moe::FusedExperts", 0) != LAYERS:
            raise AssertionError(f"{shape.name}: not all layers were taken apart\n{report}")
        return experts, Side(contrib), Side(upgraded), seconds


def measure(shape: Shape, tokens: int, copy_gbps: float) -> dict[str, Any]:
    """One row of the results."""
    experts, contrib, upgraded, seconds = sides(shape)
    stack = Stack(experts, tokens, LAYERS)
    times, answers = [], []
    for side in (contrib, upgraded):
        run = side.runner(stack)
        times.append(timing.session_time(run, nodes=LAYERS, prepare=stack.choose))
        stack.choose()
        stack.y.fill_(torch.nan)
        torch.cuda.synchronize()
        run()
        answers.append(stack.y.clone())
    return {
        "shape": shape.name,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "contrib_us": round(times[0], 2),
        "upgraded_us": round(times[1], 2),
        "ratio_to_contrib": round(times[1] / times[0], 2),
        "difference_from_contrib": float(f"{relative_difference(answers[1], answers[0]):.1e}"),
    }


COLUMNS = {
    "model": "shape",
    "T": "tokens",
    "seconds": "seconds",
    "contrib": "contrib_us",
    "upgraded": "upgraded_us",
    "upgraded/contrib": "ratio_to_contrib",
    "difference": "difference_from_contrib",
}


def main() -> None:
    rows = command.run(command.parser(__doc__, TOKENS).parse_args(), SHAPES, measure, COLUMNS)
    wrong = [
        f"{row['shape']}, T = {row['tokens']}: the answers differ by {row['difference_from_contrib']} of their norm"
        for row in rows
        if not row["difference_from_contrib"] <= STACK_TOLERANCE[row["shape"].split()[1]]  # NaN too
    ]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
