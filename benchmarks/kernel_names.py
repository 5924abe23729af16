"""Names of CUDA kernels as a reader wants them, and their times together."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}")


def short_name(kernel: str) -> str:
    """A demangled kernel's own name: without its type, its namespaces, and what stands in brackets."""
    rest = kernel
    while (fewer := _BRACKETS.sub("", rest)) != rest:
        rest = fewer
    return rest.strip().split("::")[-1].split()[-1] if rest.strip() else kernel


def together(kernels: Iterable[tuple[str, float]], layers: int) -> dict[str, float]:
    """us of a layer by short name, the longest first.

    Args:
        kernels: Name and us of every kernel that ran for all layers.
        layers: How many these are.
    """
    sums: dict[str, float] = {}
    for kernel, us in kernels:
        name = short_name(kernel)
        sums[name] = sums.get(name, 0.0) + us / layers
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
