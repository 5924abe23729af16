"""Which ONNX Runtime is installed, and whether it can run what we write."""

from __future__ import annotations

import importlib.metadata
import io
import re
from contextlib import redirect_stdout
from types import ModuleType

from ort_moe.errors import EnvironmentUnfitError

OLDEST_ORT = (1, 27)
"""Older ones ignore the overload of a function (they run the wrong body) and are built for CUDA 12."""

WHEELS = ("onnxruntime", "onnxruntime-gpu")
"""Distributions that own the import folder `onnxruntime`; only one may be installed."""


def installed_wheels() -> dict[str, str]:
    """Version of each installed ONNX Runtime distribution, by its name."""
    found = {}
    for name in WHEELS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def version_tuple(version: str) -> tuple[int, ...]:
    """`1.27.0+cu13` as (1, 27, 0); what is not a number ends it."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def require_onnxruntime() -> ModuleType:
    """The module `onnxruntime`, if it is there and new enough.

    Raises:
        EnvironmentUnfitError: It cannot be imported, or is older than `OLDEST_ORT`.
    """
    oldest = ".".join(map(str, OLDEST_ORT))
    try:
        import onnxruntime
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise EnvironmentUnfitError("no ONNX Runtime is installed: install ort-moe[cpu] or ort-moe[gpu]") from None
        raise EnvironmentUnfitError(f"ONNX Runtime is installed but cannot be imported: {error}") from error
    version = getattr(onnxruntime, "__version__", None)
    if version is None:
        raise EnvironmentUnfitError(
            "the package 'onnxruntime' has no version, as uninstalling one of two wheels leaves it behind: "
            "uninstall onnxruntime and onnxruntime-gpu, then install one"
        )
    if version_tuple(version) < OLDEST_ORT:
        raise EnvironmentUnfitError(
            f"ONNX Runtime {version} is too old: {oldest} or newer is needed (older ones ignore function overloads)"
        )
    module: ModuleType = onnxruntime
    return module


def load_cuda_libraries() -> None:
    """Loads what ONNX Runtime needs of CUDA from NVIDIA's packages beside it, where the system's loader does not look.

    What these lack, the loader is left to find. Sessions say what is missing then.
    """
    import onnxruntime

    with redirect_stdout(io.StringIO()):  # it prints what it does not find
        onnxruntime.preload_dlls()


def runtime_message(error: BaseException) -> str:
    """What an exception of ONNX Runtime says, without its status code, source file and C++ signature, on one line."""
    text = str(error)
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", text)
    text = re.sub(r"/\S*onnxruntime\S*:\d+ .*?\) (?=[A-Z])", "", text)
    return " ".join(text.split())
