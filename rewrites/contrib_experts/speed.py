"""Where ONNX Runtime's own experts are the faster ones: a table of measurements, and nothing else decides.

Whoever makes a kernel faster changes its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PARITY = 1.1
"""Up to this ratio of times we count as no slower: machines differ by as much."""


@dataclass(frozen=True)
class Measured:
    """A layer of router and experts at 1 token, as in decoding.

    Attributes:
        where: Device, type of the rows, and E/K/H/I.
        ours: us; None where ours was not run beside the contrib op.
        contrib: us of the contrib op.
    """

    where: str
    ours: float | None = None
    contrib: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our time by the contrib op's."""
        return None if self.ours is None or self.contrib is None else self.ours / self.contrib


MEASURED: Mapping[tuple[str, str], Measured] = {
    ("cuda", "dense"): Measured("H200, bfloat16 128/8/2048/768", 28.2, 53.3),
    ("cuda", "nvfp4"): Measured("H200, bfloat16 512/10/2560/640", 22.5, 52.8),
    ("cuda", "mxfp4"): Measured("H200, bfloat16 32/4/2880/2880", 32.7, 54.2),
    ("cuda", "int4"): Measured("H200, float16 512/10/2560/640", 22.4, 94.3),
    ("cuda", "int8"): Measured("H200, float16 128/8/2048/768", 21.3, 28.3),
    ("cuda", "fp8"): Measured("H200"),
    ("cpu", "dense"): Measured("float32 32/8/1024/512", 4710.0, 4600.0),
    ("cpu", "nvfp4"): Measured("float32 128/8/2048/768", 2960.0, 2860.0),
    ("cpu", "int4"): Measured("float32 128/8/2048/768", 4000.0, 5280.0),
}
"""By where the model shall run, and the format of its experts' weights, from docs/performance.md. ONNX Runtime 1.31 on
CUDA, 1.32 on the CPU. Of int8 only a decode step is faster on CUDA: with many tokens ours take 1.1 to 1.2 times as
long. What is not here is taken to be no slower: the CPU has no other kernel for it, or a coarser one."""


def why_slower(target: str, weight_format: str) -> str | None:
    """Why experts of this format are left to ONNX Runtime's own kernel there; None where they are not."""
    measured = MEASURED.get((target, weight_format))
    if measured is None or (measured.ratio is not None and measured.ratio <= PARITY):
        return None
    if measured.ratio is None:
        return f"with weights in {weight_format}, ours were not measured beside it on an {measured.where}"
    return f"with weights in {weight_format}, ours take {measured.ratio:.2f} times as long ({measured.where}, 1 token)"
