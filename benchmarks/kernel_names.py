"""Names of CUDA kernels as a reader wants them, and their times together."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]")
_QUALIFIERS = re.compile(r"\bconst\s*$")


def short_name(kernel: str) -> str:
    """A demangled kernel's own name: without its type, its namespaces, and what is in brackets; of a copy, which."""
    rest = kernel.replace("->", "")
    while (fewer := _BRACKETS.sub("", rest)) != rest:
        rest = fewer
    rest = _QUALIFIERS.sub("", rest.strip()).strip()
    if rest.startswith(("Memcpy", "Memset")) or not rest:
        return rest or kernel
    return rest.split("::")[-1].split()[-1]


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
