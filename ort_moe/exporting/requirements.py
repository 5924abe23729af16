"""Whether PyTorch and transformers are there, which nothing but an export needs."""

from __future__ import annotations

from importlib import import_module

from ort_moe.errors import EnvironmentUnfitError

_INSTALL = "install ort-moe[export]"

_USERS = ("ort_moe.exporting.architecture", "ort_moe.exporting.cached_step")
"""Modules that import what older releases of transformers lack."""


def require_exporter() -> None:
    """Imports what exports.

    Raises:
        EnvironmentUnfitError: It is not there, or too old to export; the message names the extra that has it.
    """
    for module in ("torch", "transformers"):
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            if error.name == module:
                raise EnvironmentUnfitError(
                    f"an export needs PyTorch and transformers, and {module} is not installed: {_INSTALL}"
                ) from None
            raise EnvironmentUnfitError(f"{module} is installed but cannot be imported: {error}") from error
        except ImportError as error:
            raise EnvironmentUnfitError(f"{module} is installed but cannot be imported: {error}") from error
    try:
        for module in ("transformers.exporters", "onnxscript", *_USERS):
            import_module(module)
    except ImportError as error:
        import transformers

        raise EnvironmentUnfitError(
            f"transformers {transformers.__version__} has no exporter to ONNX that works here ({error}): {_INSTALL}"
        ) from error
