"""Names of CUDA kernels as a reader wants them, and their times together."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BRACKETS = re.compile(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]")
_MANGLED = re.compile(r"_ZL?(N?)")
_LENGTH = re.compile(r"\d+")
_QUALIFIERS = re.compile(r"\bconst\s*$")


def short_name(kernel: str) -> str:
    """A kernel's own name: without its type, its namespaces, and what is in brackets; of a copy, which.

    Profilers leave the longest names mangled: `_ZN`, namespaces and name, each behind its length, or `_Z`
    and the name, then the arguments. There a template's member goes by the template's name.
    """
    if found := _MANGLED.match(kernel):
        return _last_of_nested(kernel[found.end() :], nested=bool(found[1])) or kernel
    rest = kernel.replace("->", "")
    while (fewer := _BRACKETS.sub("", rest)) != rest:
        rest = fewer
    rest = _QUALIFIERS.sub("", rest.strip()).strip()
    if rest.startswith(("Memcpy", "Memset")) or not rest:
        return rest or kernel
    return rest.split("::")[-1].split()[-1]


def _last_of_nested(names: str, *, nested: bool) -> str:
    """The last of a mangled name's identifiers before its arguments; empty where there is none."""
    last = ""
    while found := _LENGTH.match(names):
        end = found.end() + int(found[0])
        last, names = names[found.end() : end], names[end:]
        if not nested:
            break
    return last


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
