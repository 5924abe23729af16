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
    ("cuda", "dense"): Measured("H200, bfloat16 128/8/2048/768", 27.89, 52.12),
    ("cuda", "nvfp4"): Measured("H200, bfloat16 512/10/2560/640", 18.87, 53.42),
    ("cuda", "mxfp4"): Measured("H200, bfloat16 32/4/2880/2880", 31.46, 56.06),
    ("cuda", "int4"): Measured("H200, float16 512/10/2560/640", 20.74, 89.49),
    ("cuda", "int8"): Measured("H200, float16 128/8/2048/768", 20.42, 27.7),
    ("cuda", "fp8"): Measured("H200"),
    ("cpu", "dense"): Measured("float32 32/8/1024/512", 4706.0, 4602.0),
    ("cpu", "nvfp4"): Measured("float32 128/8/2048/768", 2963.0, 2860.0),
    ("cpu", "int4"): Measured("float32 128/8/2048/768", 3995.0, 5277.0),
}
"""By where the model shall run, and the format of its experts' weights, as recorded in benchmarks/results/, from even
choices. ONNX Runtime 1.31 on CUDA, 1.32 on the CPU. What is not here is taken to be no slower: the CPU has no other
kernel for it, or a coarser one."""


def why_slower(target: str, weight_format: str) -> str | None:
    """Why experts of this format are left to ONNX Runtime's own kernel there; None where they are not."""
    measured = MEASURED.get((target, weight_format))
    if measured is None or (measured.ratio is not None and measured.ratio <= PARITY):
        return None
    if measured.ratio is None:
        return f"with weights in {weight_format}, ours were not measured beside it on an {measured.where}"
    return f"with weights in {weight_format}, ours take {measured.ratio:.2f} times as long ({measured.where}, 1 token)"
