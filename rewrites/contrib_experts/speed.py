"""Where ONNX Runtime's own experts are the faster ones: a table of measurements, and nothing else decides.

Whoever makes a kernel faster changes its row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PARITY = 1.1
"""Up to this ratio of times we count as no slower: machines differ by as much."""


@dataclass(frozen=True)
class LayerSize:
    """What of a layer's sizes its time at 1 token depends on.

    Attributes:
        k: Experts chosen.
        hidden: H.
        inner: I.
    """

    k: int
    hidden: int
    inner: int

    def distance(self, other: LayerSize) -> float:
        """How unlike two layers are: by how many doublings they differ in experts chosen and in an expert's size."""
        size = self.hidden * self.inner / (other.hidden * other.inner)
        return abs(math.log2(self.k / other.k)) + abs(math.log2(size))


@dataclass(frozen=True)
class Measured:
    """A layer of router and experts at 1 token, as in decoding.

    Attributes:
        where: Device and type of the rows.
        experts: E.
        size: K, H and I.
        ours: us.
        contrib: us of the contrib op.
    """

    where: str
    experts: int
    size: LayerSize
    ours: float
    contrib: float

    @property
    def ratio(self) -> float:
        """Our time by the contrib op's."""
        return self.ours / self.contrib

    @property
    def layer(self) -> str:
        """Type of the rows and E/K/H/I, and where it was measured."""
        return f"{self.where} {self.experts}/{self.size.k}/{self.size.hidden}/{self.size.inner}"


_ONE, _WIDE = LayerSize(1, 5120, 8192), LayerSize(2, 4096, 14336)
_FINE, _FINEST = LayerSize(8, 2048, 768), LayerSize(10, 2560, 640)

MEASURED: Mapping[tuple[str, str], tuple[Measured, ...]] = {
    ("cuda", "dense"): (
        Measured("H200, bfloat16", 512, _FINEST, 35.22, 64.78),
        Measured("H200, bfloat16", 128, _FINE, 26.01, 51.29),
        Measured("H200, bfloat16", 8, _WIDE, 176.04, 207.43),
        Measured("H200, bfloat16", 16, _ONE, 77.16, 93.38),
    ),
    ("cuda", "nvfp4"): (
        Measured("H200, bfloat16", 512, _FINEST, 18.94, 52.69),
        Measured("H200, bfloat16", 128, _FINE, 15.23, 35.65),
        Measured("H200, bfloat16", 8, _WIDE, 64.44, 156.69),
        Measured("H200, bfloat16", 16, _ONE, 28.89, 62.42),
    ),
    ("cuda", "mxfp4"): (
        Measured("H200, bfloat16", 128, _FINE, 15.41, 33.18),
        Measured("H200, bfloat16", 32, LayerSize(4, 2880, 2880), 31.11, 53.66),
        Measured("H200, bfloat16", 8, _WIDE, 66.16, 131.88),
        Measured("H200, bfloat16", 16, _ONE, 30.32, 64.59),
    ),
    ("cuda", "int4"): (
        Measured("H200, float16", 512, _FINEST, 19.69, 87.86),
        Measured("H200, float16", 128, _FINE, 15.82, 27.35),
        Measured("H200, float16", 8, _WIDE, 67.08, 72.12),
        Measured("H200, float16", 16, _ONE, 30.81, 35.55),
    ),
    ("cuda", "int8"): (
        Measured("H200, float16", 128, _FINE, 19.92, 27.78),
        Measured("H200, float16", 8, _WIDE, 97.41, 99.41),
        Measured("H200, float16", 16, _ONE, 41.69, 44.96),
    ),
    ("cuda", "fp8"): (),
    ("cpu", "dense"): (Measured("float32", 32, LayerSize(8, 1024, 512), 4706.0, 4602.0),),
    ("cpu", "nvfp4"): (
        Measured("float32", 512, _FINEST, 3389.0, 3360.0),
        Measured("float32", 128, _FINE, 2963.0, 2860.0),
    ),
    ("cpu", "int4"): (Measured("float32", 128, _FINE, 3995.0, 5277.0),),
}
"""By where the model shall run, and the format of its experts' weights, as recorded in benchmarks/results/, from even
choices. ONNX Runtime 1.31 on CUDA, 1.32 on the CPU. Where there is no row ours were not run beside the contrib op; what
is not here is taken to be no slower: the CPU has no other kernel for it, or a coarser one."""


def why_slower(target: str, weight_format: str, size: LayerSize) -> str | None:
    """Why experts are left to ONNX Runtime's own kernel there; None where they are not.

    The measured layer of their format that is most like theirs decides.
    """
    layers = MEASURED.get((target, weight_format))
    if layers is None:
        return None
    if not layers:
        return f"with weights in {weight_format}, ours were not measured beside it on an H200"
    nearest = min(layers, key=lambda measured: size.distance(measured.size))
    if nearest.ratio <= PARITY:
        return None
    return (
        f"with weights in {weight_format}, ours take {nearest.ratio:.2f} times as long in the layer measured that is "
        f"most like its {size.k}/{size.hidden}/{size.inner} of K/H/I ({nearest.layer}, 1 token)"
    )
