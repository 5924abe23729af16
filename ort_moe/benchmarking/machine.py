"""What a measurement ran on, and what memory it took: read from the system, without packages for it."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Mapping
from pathlib import Path


def processor() -> Mapping[str, str]:
    """What the system says of the first processor: its `model name` and its `flags` among others."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def processor_name() -> str:
    """The processor's name, with the number of processors that this process may use."""
    return f"{processor().get('model name', 'unknown processor')}, {len(os.sched_getaffinity(0))} processors"


def gpu_name() -> str:
    """Name of the GPU that CUDA takes first."""
    return _of_gpu("name") or "unknown GPU"


def used_gpu_bytes() -> int | None:
    """Memory in use on that GPU, by whomever; None where `nvidia-smi` does not tell."""
    mebibytes = _of_gpu("memory.used")
    return int(mebibytes) << 20 if mebibytes is not None and mebibytes.isdecimal() else None


def _of_gpu(field: str) -> str | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def most_host_bytes() -> int:
    """Most resident memory that this process has had.

    Not by `getrusage` unless nothing else tells: what that says begins with the memory of the process that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def free_host_bytes() -> int:
    """Memory that new processes may take: what the system has, and what the limit of a container leaves."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith("MemAvailable:")]
    free = int(line.split()[1]) << 10
    try:
        most, used = (
            Path("/sys/fs/cgroup", name).read_text(encoding="ascii") for name in ("memory.max", "memory.current")
        )
    except OSError:
        return free
    return free if not most.strip().isdecimal() else max(0, min(free, int(most) - int(used)))
