"""What nvidia-smi says of the first GPU; needs nothing but that."""

from __future__ import annotations

import subprocess
from typing import Any


def gpu_state() -> dict[str, Any]:
    """Name, driver and clocks in MHz as found.

    Raises:
        OSError: There is no nvidia-smi.
        subprocess.CalledProcessError: It fails.
    """
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver, sm, memory, max_sm = (field.strip() for field in line.split(","))
    return {"gpu": name, "driver": driver, "sm_mhz": int(sm), "memory_mhz": int(memory), "max_sm_mhz": int(max_sm)}
