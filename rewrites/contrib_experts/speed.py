"""Where ONNX Runtime's own experts are the faster ones: a table of measurements, and nothing else decides.

The figures are those of docs/performance.md: us or ms of a whole layer, FusedRouter and FusedExperts, beside those of
the contrib op at the tokens of a decode step. Whoever makes a kernel faster changes its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PARITY = 1.1
"""Up to this ratio of times we count as no slower: machines differ by as much."""


@dataclass(frozen=True)
class Measured:
    """A layer at the few tokens of a decode step.

    Attributes:
        ratio: Our time by the contrib op's at 1 token; None where the two were not run beside each other.
        where: Machine and size of the layer.
    """

    ratio: float | None
    where: str


MEASURED: Mapping[tuple[str, str], Measured] = {
    ("cuda", "dense"): Measured(0.50, "bfloat16, 512 experts, on an H200"),
    ("cuda", "nvfp4"): Measured(0.42, "bfloat16, 512 experts, on an H200"),
    ("cuda", "mxfp4"): Measured(1.42, "bfloat16, 32 experts, on an H200"),
    ("cuda", "int4"): Measured(None, "on an H200"),
    ("cuda", "int8"): Measured(None, "on an H200"),
    ("cuda", "fp8"): Measured(None, "on an H200"),
    ("cpu", "dense"): Measured(1.02, "float32, 32 experts"),
    ("cpu", "nvfp4"): Measured(1.04, "float32, 128 experts"),
    ("cpu", "int4"): Measured(0.76, "float32, 128 experts"),
}
"""By where the model shall run, and the format of its experts' weights. On the CPU, what is not here has no other
kernel to be slower than, or was never slower."""


def why_slower(target: str, weight_format: str) -> str | None:
    """Why experts of this format are left to ONNX Runtime's own kernel there; None where they are not."""
    measured = MEASURED.get((target, weight_format))
    if measured is None or (measured.ratio is not None and measured.ratio <= PARITY):
        return None
    if measured.ratio is None:
        return f"with weights in {weight_format}, ours were not measured to be as fast {measured.where}"
    return f"with weights in {weight_format}, ours take {measured.ratio:g} times as long ({measured.where}, 1 token)"
