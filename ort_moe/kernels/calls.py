"""Calling the library's launchers by ctypes: the functions, and what stands in their structures."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from ort_moe.installation.library import library_path
from ort_moe.ops import ACTIVATION_TYPES, ROUTING_MAPS, Op

MAPS = tuple(tensor.name for tensor in ROUTING_MAPS)
"""The routing maps in the order of a structure."""


@dataclass(frozen=True)
class RoutingMaps:
    """Addresses of the four routing maps of T tokens with K choices each among E experts, R = T * K.

    Attributes:
        permuted_to_unpermuted: (R) int32.
        unpermuted_to_permuted: (R) int32.
        permuted_to_expert: (R) int32.
        expert_first_token_offset: (E + 1) int64.
    """

    permuted_to_unpermuted: int
    unpermuted_to_permuted: int
    permuted_to_expert: int
    expert_first_token_offset: int


@cache
def _function(name: str) -> Any:
    """A C function of the library, which returns a size or, where it launches or runs, null or an error."""
    library = ctypes.CDLL(str(library_path()))
    launches, runs = name.startswith("ort_moe_launch_"), name.startswith("ort_moe_run_")
    if not hasattr(library, name):
        cause = "is of another version" if runs else "was built without CUDA kernels"
        raise RuntimeError(f"{library_path()} {cause}: it has no {name}")
    function = getattr(library, name)
    second = ((ctypes.c_void_p,) if launches else ()) + ((ctypes.c_int64,) if runs else ())
    function.argtypes = (ctypes.c_void_p, *second)
    function.restype = ctypes.c_char_p if second else ctypes.c_int64
    return function


def launch(name: str, call: ctypes.Structure, stream: int) -> None:
    """Calls the launcher of an op on a stream.

    Raises:
        RuntimeError: It returned an error, or the library has none.
    """
    _call(f"ort_moe_launch_{name}", call, stream)


def launch_or_run(name: str, call: ctypes.Structure, stream: int, cpu_threads: int | None) -> None:
    """Calls the launcher of an op on a stream or, with a number of threads, its kernel on the host.

    Raises:
        RuntimeError: It returned an error, or the library has none.
    """
    if cpu_threads is None:
        launch(name, call, stream)
    else:
        _call(f"ort_moe_run_{name}", call, cpu_threads)


def _call(function: str, call: ctypes.Structure, argument: int) -> None:
    error: bytes | None = _function(function)(ctypes.byref(call), argument)
    if error is not None:
        raise RuntimeError(error.decode())


def scratch_bytes(name: str, call: ctypes.Structure) -> int:
    """Bytes of scratch that a launcher needs.

    Raises:
        RuntimeError: The library has no such launcher.
    """
    size: int = _function(f"ort_moe_{name}_scratch_bytes")(ctypes.byref(call))
    return size


def dtype_number(dtype: str) -> int:
    """The number of a type of activations.

    Raises:
        ValueError: It is none.
    """
    if dtype not in ACTIVATION_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(ACTIVATION_TYPES)}, but is {dtype!r}")
    return ACTIVATION_TYPES.index(dtype)


def choice_number(op: Op, name: str, value: str) -> int:
    """Number of an attribute's choice: the C++ enumerations have the order of the op table."""
    return op.attribute(name).choices.index(value)


def addresses(maps: RoutingMaps | None) -> dict[str, int]:
    """The addresses of routing maps by name; nothing of none."""
    return {} if maps is None else {name: getattr(maps, name) for name in MAPS}
