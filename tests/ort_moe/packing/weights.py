"""Weights to pack."""

from __future__ import annotations

from typing import Any

import numpy as np


def random_weights(shape: tuple[int, ...], seed: int = 0) -> Any:
    """As those of a model are spread."""
    return np.random.default_rng(seed).normal(0.0, 0.1, shape).astype(np.float32)
