"""Timing on a CUDA device: graphs of many launches replayed from a cold L2 cache, copy bandwidth, and what ran where.

Needs torch, for memory, graphs and events.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""Written before each replay: several times any L2 cache."""

COPY_BYTES = 2 << 30
"""Size of the copy whose bandwidth is the ceiling of memory-bound kernels."""

TORCH_TYPES = {"float": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types of activations by their ONNX names."""


def graph_time(
    launch: Callable[[int, int], None],
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
    with torch.cuda.stream(stream):
        launch(0, stream.cuda_stream)  # loads the kernel outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for n in range(launches):
            launch(n, stream.cuda_stream)
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


def moving_time(moved_bytes: int, *, launches: int = 100, memory_bytes: int = 2 << 30) -> float:
    """Time of an element-wise kernel that reads and writes so many bytes in all, in us, like `graph_time`.

    Args:
        moved_bytes: Half of them are read.
        launches: Nodes of the graph at most.
        memory_bytes: Of all buffers of the graph at most, but for the first two.
    """
    elements = max(1, moved_bytes // 16)
    count = max(2, min(launches, memory_bytes // moved_bytes))
    source, target = (torch.zeros(count, elements, dtype=torch.int64, device="cuda") for _ in range(2))
    return graph_time(lambda n, _: torch.bitwise_not(source[n % count], out=target[n % count]), launches=max(16, count))


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

    The version of ONNX Runtime is there where it is installed; not every benchmark needs it.
    """
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    line = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    name, driver, sm, memory, max_sm = (field.strip() for field in line.split(","))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": name,
        "driver": driver,
        "cuda": torch.version.cuda,
        **_onnxruntime(),
        "torch": torch.__version__,
        "sm_mhz": int(sm),
        "memory_mhz": int(memory),
        "max_sm_mhz": int(max_sm),
    }


def _onnxruntime() -> dict[str, str]:
    try:
        import onnxruntime
    except ImportError:
        return {}
    return {"onnxruntime": onnxruntime.__version__}
