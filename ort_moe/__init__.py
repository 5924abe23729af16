"""Fast Mixture-of-Experts models in ONNX Runtime.

    report = ort_moe.optimize("model.onnx", "out.onnx")
    session = ort_moe.session("out.onnx", providers=["CUDAExecutionProvider"])

`export` makes ONNX of a Hugging Face folder, and `DecodeLoop` runs a decode graph step after step on fixed buffers, on
CUDA as a graph that is replayed. `inspect`, `explain` and `verify` look at models, `bench` measures them, `diagnose`
looks at the installation. `register` and `library_path` are for people who create their sessions themselves;
`register_schemas` teaches our operators to `onnx.checker` and to ONNX's shape inference.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing for it would cost more than the rest of this file
if TYPE_CHECKING:
    from ort_moe.benchmarking import bench
    from ort_moe.diagnosis.doctor import diagnose
    from ort_moe.errors import (
        DecodeError,
        EnvironmentUnfitError,
        ModelError,
        OrtMoeError,
        OutputError,
        VerificationError,
    )
    from ort_moe.exporting.export import export
    from ort_moe.inspection.explain import explain
    from ort_moe.inspection.inspect import inspect
    from ort_moe.installation.library import library_path, register
    from ort_moe.ops.schemas import register_schemas
    from ort_moe.optimization.optimize import optimize
    from ort_moe.running.decode_loop import DecodeLoop
    from ort_moe.running.session import session
    from ort_moe.verification import verify

__all__ = [
    "DecodeError",
    "DecodeLoop",
    "EnvironmentUnfitError",
    "ModelError",
    "OrtMoeError",
    "OutputError",
    "VerificationError",
    "bench",
    "diagnose",
    "explain",
    "export",
    "inspect",
    "library_path",
    "optimize",
    "register",
    "register_schemas",
    "session",
    "verify",
]

# Loaded on first use: `import ort_moe` must cost nothing.
_MODULE_OF = {
    "DecodeError": "ort_moe.errors",
    "DecodeLoop": "ort_moe.running.decode_loop",
    "EnvironmentUnfitError": "ort_moe.errors",
    "ModelError": "ort_moe.errors",
    "OrtMoeError": "ort_moe.errors",
    "OutputError": "ort_moe.errors",
    "VerificationError": "ort_moe.errors",
    "bench": "ort_moe.benchmarking",
    "diagnose": "ort_moe.diagnosis.doctor",
    "explain": "ort_moe.inspection.explain",
    "export": "ort_moe.exporting.export",
    "inspect": "ort_moe.inspection.inspect",
    "library_path": "ort_moe.installation.library",
    "optimize": "ort_moe.optimization.optimize",
    "register": "ort_moe.installation.library",
    "register_schemas": "ort_moe.ops.schemas",
    "session": "ort_moe.running.session",
    "verify": "ort_moe.verification",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("ort-moe")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ort_moe' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
