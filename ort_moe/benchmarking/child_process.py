"""Measures a model in a process of its own, so that neither its memory nor its end is another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ort_moe.benchmarking.measurement import Measurement, Order, Point, measure
from ort_moe.errors import EnvironmentUnfitError, ModelError, OrtMoeError

_LONGEST_LINE = 300
"""Of what a process that broke down said last."""


def measure_apart(order: Order) -> Measurement:
    """Measures in another process.

    Raises:
        ModelError: ONNX Runtime does not take the model, no inputs can be made for it, or the process broke down.
        EnvironmentUnfitError: The provider does not start.
    """
    with tempfile.TemporaryDirectory(prefix="ort-moe-") as folder:
        answer = Path(folder, "answer.json")
        # `nvidia-smi` counts GPUs in this order, and by default CUDA does not.
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        code = f"from {__name__} import answer_order; answer_order()"
        command = [sys.executable, "-P", "-c", code, json.dumps(asdict(order)), os.fspath(answer)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment
        )
        if done.returncode != 0 or not answer.exists():
            raise ModelError(_breakdown(done))
        document = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in document:
        raise (EnvironmentUnfitError if document["unfit"] else ModelError)(document["error"])
    points = tuple(Point(**point) for point in document.pop("points"))
    return Measurement(**document, points=points)


def _breakdown(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended that did not answer."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        cause = ", as where memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{cause}"
    said = done.stderr.strip().splitlines() or ["nothing"]
    return f"its process ended with {done.returncode} and said {said[-1][:_LONGEST_LINE]}"


def answer_order() -> None:
    """What the other process does: measures what its first argument orders, in JSON, and answers in its second."""
    given, answer = sys.argv[1:]
    fields = json.loads(given)
    try:
        document = asdict(measure(Order(**{**fields, "tokens": tuple(fields["tokens"])})))
    except OrtMoeError as error:
        document = {"error": str(error), "unfit": isinstance(error, EnvironmentUnfitError)}
    Path(answer).write_text(json.dumps(document), encoding="utf-8")
