"""Timing on a CUDA device: graphs of many launches replayed from a cold L2 cache, copy bandwidth, and what ran where.

Needs torch, for memory, graphs and events.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_state import gpu_state

FLUSH_BYTES = 256 << 20
"""Written before each replay: several times any L2 cache."""

SPACING = 4096
"""Bytes between the buffers of small launches at least: no two share a DRAM page's burst."""

COPY_BYTES = 2 << 30
"""Size of the copy whose bandwidth is the ceiling of memory-bound kernels."""

TORCH_TYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types of activations by their ONNX names."""


def graph_time(
    launch: Callable[[int, int], object],
    *,
    launches: int,
    repeats: int = 15,
    prepare: Callable[[int], None] = lambda _: None,
) -> float:
    """Median time of one launch in a CUDA graph of many, in us; includes the graph's gap between launches.

    Args:
        launch: Called as `launch(n, stream)` for n in 0 .. launches; should use another buffer for each n, so that
            each launch finds its data in memory rather than in the cache.
        launches: Nodes of the graph.
        repeats: Replays; the cache is flushed before each, outside of the time.
        prepare: Called before each replay with its number, outside of the time.
    """
    stream = torch.cuda.Stream()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()  # what other streams write to the buffers
    with torch.cuda.stream(stream):
        launch(0, stream.cuda_stream)  # loads the kernel outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()  # torch.cuda.graph would also give back all free memory, which takes long
        try:
            for n in range(launches):
                launch(n, stream.cuda_stream)
        finally:
            graph.capture_end()
    times = []
    with torch.cuda.stream(stream):
        graph.replay()
        for repeat in range(repeats):
            prepare(repeat)
            flush.fill_(repeat)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def session_time(
    run: Callable[[], None], *, nodes: int, repeats: int = 25, prepare: Callable[[int], None] = lambda _: None
) -> float:
    """Median host time of a synchronous run divided by its nodes, in us: run overhead counts, so give it many nodes."""
    for _ in range(3):
        run()
    times = []
    for repeat in range(repeats):
        prepare(repeat)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6 / nodes)
    return statistics.median(times)


def require_gpu() -> None:
    """Ends the program with one sentence where nothing could be timed."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks need an NVIDIA GPU and PyTorch for CUDA, but PyTorch {torch.__version__} finds no CUDA device"
        )


def copy_bandwidth(repeats: int = 10) -> float:
    """Bandwidth of a large device-to-device copy in GB/s, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * COPY_BYTES / statistics.median(times) / 1e9


def environment() -> dict[str, Any]:
    """GPU, driver, clocks as found, versions and date: what a result is worth little without.

    The version of ONNX Runtime is there where it has been loaded; not every benchmark needs it.
    """
    found = gpu_state()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": found.pop("gpu"),
        "driver": found.pop("driver"),
        "cuda": torch.version.cuda,
        **_onnxruntime(),
        "torch": torch.__version__,
        **found,
    }


def _onnxruntime() -> dict[str, str]:
    runtime = sys.modules.get("onnxruntime")
    return {} if runtime is None else {"onnxruntime": runtime.__version__}
