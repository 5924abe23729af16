"""A session on the CPU that does what ONNX Runtime's CUDA provider does with `enable_cuda_graph`.

The first run with a graph id, in each thread, is a warm-up, another one and the capture with its replay: three runs.
Every later one replays what was captured: it reads and writes the buffers that were bound then, whatever is bound now.
"""

from __future__ import annotations

import threading
from typing import Any

import onnx
import onnxruntime

from ort_moe.running.session import CPU, CUDA, session

RUNS_UNTIL_CAPTURED = 3


class GraphSession:
    """Wraps a session.

    Attributes:
        runs: How often the model was run.
        graphs: The graphs that were captured, by thread and id.
    """

    def __init__(self, model: onnx.ModelProto | str, *, enabled: bool = True) -> None:
        source = model if isinstance(model, str) else model.SerializeToString()
        self._real = session(source, providers=[CPU])
        self._enabled = enabled
        self.runs = 0
        self.graphs: dict[tuple[threading.Thread, str], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {CUDA: {"device_id": "0", "enable_cuda_graph": "1" if self._enabled else "0"}, CPU: {}}

    def io_binding(self) -> Any:
        return onnxruntime.IOBinding(self._real)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        graph = options.get_run_config_entry("gpu_graph_id")
        if not self._enabled or graph == "-1":
            self._run(binding)
            return
        place = (threading.current_thread(), graph)
        if place not in self.graphs:
            self.graphs[place] = binding
            for _ in range(RUNS_UNTIL_CAPTURED - 1):
                self._run(binding)
        self._run(self.graphs[place])

    def _run(self, binding: Any) -> None:
        self.runs += 1
        self._real.run_with_iobinding(binding)
