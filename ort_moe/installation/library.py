"""The native library: where it lies, what it holds, and how a session gets it."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ort_moe
from ort_moe.errors import EnvironmentUnfitError
from ort_moe.installation.environment import runtime_message

if TYPE_CHECKING:
    import onnxruntime

NAME = "libort_moe.so"
"""File name of the library, in the package's folder."""

OVERRIDE = "ORT_MOE_LIBRARY"
"""Environment variable with the path of a library to take instead."""


def library_path() -> Path:
    """The library to register with a session in any language; `ORT_MOE_LIBRARY` overrides the installed one.

    Raises:
        EnvironmentUnfitError: There is none.
    """
    given = os.environ.get(OVERRIDE)
    if given:
        path = Path(given)
        if not path.is_file():
            raise EnvironmentUnfitError(f"{OVERRIDE} must name the library {NAME}, but there is no file {path}")
        return path
    # An editable install has two folders: the sources, and the one with what was built.
    folders = [Path(entry) for entry in ort_moe.__path__]
    for folder in folders:
        if (folder / NAME).is_file():
            return folder / NAME
    raise EnvironmentUnfitError(
        f"the library {NAME} is not in {' or '.join(map(str, folders))}: install ort-moe from a wheel for "
        f"{platform.system()} {platform.machine()}, or build it with 'pip install .'"
    )


def build_info() -> dict[str, Any]:
    """How the library was built.

    Returns:
        `version`; `cuda`, None or a dict with the `toolkit` version and the `architectures`; `ort_api_version`, the
        newest C API it uses; `compiler`.

    Raises:
        EnvironmentUnfitError: There is no library, or it cannot be loaded.
    """
    return _call("ort_moe_build_info")


def describe_ops() -> dict[str, Any]:
    """What the library registers.

    Returns:
        `domain`, `version` and `ops`: of each the `name`, `inputs` and `outputs` (`name`, `types`, `optional`),
        `attributes` (`name`, `kind`, `choices`, `only_with`) and `providers`. An infinity is the string "-inf".

    Raises:
        EnvironmentUnfitError: There is no library, or it cannot be loaded.
    """
    return _call("ort_moe_describe_ops")


def register(options: onnxruntime.SessionOptions) -> None:
    """Makes the ops known to sessions created with these options; a second call changes nothing.

    Args:
        options: An `onnxruntime.SessionOptions`.

    Raises:
        EnvironmentUnfitError: The library is missing or cannot be loaded, or refuses this ONNX Runtime.
    """
    path = library_path()
    _load(path)  # its error says more than ONNX Runtime's
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        raise EnvironmentUnfitError(f"ONNX Runtime does not take {path}: {runtime_message(error)}") from error


def _call(function: str) -> dict[str, Any]:
    export = getattr(_load(library_path()), function)
    export.restype = ctypes.c_char_p
    return cast(dict[str, Any], json.loads(export()))


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{path} cannot be loaded on {platform.system()} {platform.machine()} ({error}): install ort-moe from a "
            "wheel for this platform, or build it with 'pip install .'"
        ) from error
    if not hasattr(library, "ort_moe_build_info"):
        raise EnvironmentUnfitError(f"{path} is not the library of ort-moe: it lacks ort_moe_build_info")
    return library
