"""Nodes that several tests of experts write.

Layers of matrices that lie transposed, the weights of all experts, and rows sorted by their expert and back.
"""

from __future__ import annotations

import numpy as np

from tests.rewrites.blocks import EXPERTS
from tests.rewrites.experts.experts_models import transposed

# As `FC1` and `FC2` of experts_models.py, with their weights.
FC1_TRANSPOSED = """
    matrices1 = Gather <axis = 0> (fc1, list)
    column1 = Unsqueeze (rows, one)
    product1 = MatMul (column1, matrices1)
    made1 = Squeeze (product1, one)"""
FC2_TRANSPOSED = """
    matrices2 = Gather <axis = 0> (fc2, list)
    column2 = Unsqueeze (active, one)
    product2 = MatMul (column2, matrices2)
    made2 = Squeeze (product2, one)"""
TRANSPOSED = {"fc1": transposed("fc1"), "fc2": transposed("fc2")}

# Reads `logits`, `ids` and `weights` and writes `by_expert`, the weights of all experts.
SCATTER = """
    shape = Shape (logits)
    nothing = ConstantOfShape (shape)
    scattered = ScatterElements <axis = 1> (nothing, ids, weights)
    by_expert = Transpose <perm = [1, 0]> (scattered)"""

# Choices sorted by expert: reads `list` and writes `rows`, and `ends` of each expert's among them.
SORT = """
    places_shape = Shape (list)
    sorted, perm = TopK <largest = 0> (list, places_shape)
    is_below = Less (perm, zero)
    rest = Mod (perm, k)
    has_rest = Cast <to = 9> (rest)
    rounds = And (is_below, has_rest)
    correction = Cast <to = 7> (rounds)
    quotient = Div (perm, k)
    token = Sub (quotient, correction)
    rows = Gather (x, token)
    float_ids = Cast <to = 1> (sorted)
    scaled = Div (float_ids, bin_width)
    bins0 = Cast <to = 7> (scaled)
    bins = Clip (bins0, first, last)
    ones = Expand (one_float, places_shape)
    counts = ScatterElements <axis = 0, reduction = "add"> (no_counts, bins, ones)
    whole_counts = Cast <to = 7> (counts)
    ends = CumSum (whole_counts, first)"""

# Reads `made2` and writes `weighted`, still sorted.
WEIGH_SORTED = """
    flat_weights = Reshape (weights, minus1)
    sorted_weights = GatherElements <axis = 0> (flat_weights, perm)
    weight_column = Unsqueeze (sorted_weights, minus1)
    weighted = Mul (made2, weight_column)"""

# Reads `weighted` and writes `y`.
UNSORT = """
    perm_column = Unsqueeze (perm, minus1)
    count = Size (perm)
    numbers = Range (first, count, step)
    inverse = ScatterND (perm, perm_column, numbers)
    back = Gather (weighted, inverse)
    by_token = Reshape (back, by_token_shape)
    y = ReduceSum <keepdims = 0> (by_token, one)"""

GROUPED_CONSTANTS = {
    "fc1": transposed("fc1"),
    "fc2": transposed("fc2"),
    "zero": np.array([0], np.int64),
    "first": np.array(0, np.int64),
    "last": np.array(EXPERTS - 1, np.int64),
    "step": np.array(1, np.int64),
    "bin_width": np.array((EXPERTS - 1) / EXPERTS, np.float32),
    "one_float": np.array(1.0, np.float32),
    "no_counts": np.zeros(EXPERTS, np.float32),
}
"""What these texts read."""


def ranges() -> str:
    """Reads `ends` and writes `range0`, `range1` ...: the places of each expert's rows."""
    ends = ", ".join(f"end_{e}" for e in range(EXPERTS))
    lines = [f"{ends} = Split <axis = 0, num_outputs = {EXPERTS}> (ends)"]
    for e in range(EXPERTS):
        lines.append(f"end{e} = Squeeze (end_{e}, zero)")
        lines.append(f"range{e} = Range ({f'end{e - 1}' if e else 'first'}, end{e}, step)")
    return "".join(f"\n    {line}" for line in lines)
