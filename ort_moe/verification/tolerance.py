"""When two results are the same: tolerances by precision, and routing compared without being fooled by ties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.floating]
    Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Tolerance:
    """What a precision allows; differences are relative to the largest magnitude of what is compared.

    Attributes:
        weights: Mixing weights of one router on equal logits; of larger ones, more by their `coarseness`.
        experts: What one layer of experts returns on equal rows and equal routing.
        outputs: Outputs of a whole model.
        tie: Logits of one row closer than this may be ranked either way, relative to the row's largest (at least 1).
    """

    weights: float
    experts: float
    outputs: float
    tie: float


# Experts in half precision: an export rounds the mixing weights, each factor of the activation and, in some, each
# product with a weight and their sum; FusedExperts rounds each layer and the activation once, and sums in float32.
# That is five roundings more, of at most 5e-4 (float16) and 4e-3 (bfloat16) each.
# Measured on exported models: fp32 5e-7 and fp16 1.7e-3 of the outputs' maximum, from a rounding that fusion drops.
# The room above is for depth; a wrong expert or a missing factor shows as 1e-1 and more.
TOLERANCES = {
    "float32": Tolerance(weights=5e-6, experts=2e-5, outputs=1e-4, tie=1e-5),
    "float16": Tolerance(weights=4e-3, experts=6e-3, outputs=1e-2, tie=4e-3),
    "bfloat16": Tolerance(weights=3e-2, experts=4e-2, outputs=6e-2, tie=3e-2),
}

_FINELY_TOLD = 8.0
"""Up to this magnitude a step between logits is no more than a tolerance of weights."""


def coarsest(dtypes: set[str]) -> Tolerance:
    """The tolerance of the coarsest precision among NumPy dtype names; float32's where none is coarser."""
    return TOLERANCES[next((name for name in ("bfloat16", "float16") if name in dtypes), "float32")]


def coarseness(logits: Floats) -> Floats:
    """For each row of logits (R, E), by how much more mixing weights may differ because its logits are large: (R,).

    ONNX Runtime may run the router in float32 where the logits that it gives out are rounded. That moves a logit by
    half a step of its type, which grows with it, and a softmax by at most half as much as two logits move apart.
    """
    import numpy as np

    largest = np.abs(np.where(np.isfinite(logits), logits, 0).astype(np.float64)).max(axis=-1, initial=0.0)
    factor: Floats = np.maximum(largest / _FINELY_TOLD, 1.0)
    return factor


def told(limit: float) -> str:
    """A limit as sentences and tables write it: in one digit below 0.1, where that is all it has."""
    short = f"{limit:.0e}"
    return short if limit < 0.1 and float(short) == limit else f"{limit:.2g}"


def as_rows(array: Any) -> Any:
    """An array (..., N) as rows (R, N)."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])  # -1 is not told where N is 0


def relative_difference(got: Floats, expected: Floats) -> float:
    """Largest difference, relative to the largest finite magnitude expected (1 where that is 0).

    NaN equals NaN and infinities equal themselves; where only one of two is not finite, the difference is infinite.
    """
    import numpy as np

    if got.shape != expected.shape:
        return float("inf")
    if got.size == 0:
        return 0.0
    a, b = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not (np.isfinite(a) == finite).all() or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    largest = float(np.abs(b[finite]).max()) or 1.0
    return float(np.abs(a[finite] - b[finite]).max()) / largest


def by_expert(weights: Floats, indices: Integers) -> tuple[Floats, Integers]:
    """Weights and indices (R, K) with each row sorted by expert: the order of the chosen is not part of the answer."""
    import numpy as np

    order = np.argsort(indices, axis=-1, kind="stable")
    return np.take_along_axis(weights, order, -1), np.take_along_axis(indices, order, -1)


def near_tied(logits: Floats, k: int, tie: float) -> npt.NDArray[np.bool_]:
    """For each row of logits (R, E), whether the K-th largest and the next are closer than a tie's width."""
    import numpy as np

    if k >= logits.shape[-1]:
        return np.zeros(len(logits), np.bool_)
    ranked = -np.sort(-logits.astype(np.float64), axis=-1)
    width = 2 * tie * np.maximum(np.abs(np.where(np.isfinite(ranked), ranked, 0.0)).max(axis=-1), 1.0)
    with np.errstate(invalid="ignore"):
        gap = ranked[:, k - 1] - ranked[:, k]
    close: npt.NDArray[np.bool_] = ~(gap > width)
    return close


def favoured(logits: Floats, indices: Integers, tie: float) -> Floats:
    """Logits (R, E) moved by no more than a tie's width towards the choice `indices` (R, K).

    A router that makes this choice on the moved logits, but another on the given ones, was near a tie.
    """
    import numpy as np

    moved = logits.astype(np.float32)
    finite = np.where(np.isfinite(moved), np.abs(moved), 0)
    width = tie * np.maximum(finite.max(axis=-1, keepdims=True), 1.0)
    direction = np.full(moved.shape, -1.0, np.float32)
    np.put_along_axis(direction, indices.astype(np.int64), 1.0, -1)
    result: Floats = (moved + width * direction).astype(logits.dtype)
    return result
