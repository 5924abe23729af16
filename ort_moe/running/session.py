"""A session that has our ops and runs where it was told to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_moe.errors import EnvironmentUnfitError, ModelError
from ort_moe.files.model_path import is_utf8, model_file
from ort_moe.graphs.graph_capture import CaptureBlocker, capture_blockers, off_device, refusal
from ort_moe.installation.environment import installed_wheels, load_cuda_libraries, require_onnxruntime, runtime_message
from ort_moe.installation.library import build_info, register
from ort_moe.running.session_model import RECORD_PROVIDERS, nodes_on, read_model

if TYPE_CHECKING:
    import onnxruntime

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

ON_CPU = (CPU,)
"""The execution providers of a run on the CPU alone."""

Provider = str | tuple[str, dict[str, Any]]
"""The name of an execution provider, or the name and its options, as ONNX Runtime takes them."""


def session(
    model: str | os.PathLike[str] | bytes,
    providers: Sequence[Provider] | None = None,
    *,
    options: onnxruntime.SessionOptions | None = None,
    **arguments: Any,
) -> onnxruntime.InferenceSession:
    """Creates an ONNX Runtime session with our ops registered.

    Args:
        model: Path of a model or of a folder with one, or a serialised one.
        providers: Execution providers, best first. None: CUDA where this ONNX Runtime and our library both have it,
            then the CPU. Unlike ONNX Runtime's own constructor, this one does not fall back in silence.
        options: Session options to use; our ops are added to them.
        arguments: Passed on to `onnxruntime.InferenceSession`.

    Raises:
        EnvironmentUnfitError: ONNX Runtime is missing, too old or installed twice, our library is missing, or a
            provider that was asked for is not there or did not start.
        ModelError: ONNX Runtime does not take the model; its sentence follows, and with `enable_cuda_graph` the nodes
            that cannot be captured.
        ValueError: The providers are no list of them.
    """
    ort = require_onnxruntime()
    _require_one_wheel()
    chosen = default_providers(ort.get_available_providers()) if providers is None else providers
    names = provider_names(chosen)
    require_providers(names, ort.get_available_providers())
    if options is None:
        options = ort.SessionOptions()
    register(options)
    captures = any(not isinstance(p, str) and captures_graph(p[1]) for p in chosen)
    if captures:  # so that it can be asked which nodes are in the way
        options.add_session_config_entry(*RECORD_PROVIDERS)
    if not isinstance(model, bytes):
        model = os.fspath(model_file(model))
        if not Path(model).is_file():
            raise ModelError(f"there is no model {model}")
        if not is_utf8(model):
            raise ModelError(f"ONNX Runtime does not take {model}: its name is not UTF-8")
    try:
        created = ort.InferenceSession(model, options, providers=list(chosen), **arguments)
    except Exception as error:
        name = "the model" if isinstance(model, bytes) else model
        why = refusal(name, _in_the_way(model, options, chosen)) if captures else ""
        raise ModelError(why or f"ONNX Runtime does not take {name}: {runtime_message(error)}") from error
    require_started(names, created.get_providers())
    return created


def provider_names(providers: Sequence[Provider]) -> tuple[str, ...]:
    """The providers without their options.

    Raises:
        ValueError: They are no list of these, but one alone, say: a string is a sequence, too.
    """
    if isinstance(providers, str) or not isinstance(providers, Sequence) or not all(map(_is_provider, providers)):
        raise ValueError(
            f"providers are a list of names, or of pairs of a name and options, such as ['{CPU}'], but "
            f"{providers!r} came"
        )
    return tuple(provider if isinstance(provider, str) else provider[0] for provider in providers)


def _is_provider(given: object) -> bool:
    """Whether it is what ONNX Runtime takes; of a pair that is no tuple, it prints an error and takes another."""
    if isinstance(given, tuple) and len(given) == 2:
        return isinstance(given[0], str) and isinstance(given[1], dict)
    return isinstance(given, str)


def captures_graph(options: Mapping[str, Any]) -> bool:
    """Whether a provider's options ask for a CUDA graph."""
    return str(options.get("enable_cuda_graph", 0)).lower() in ("1", "true")


def _in_the_way(
    model: str | bytes, options: onnxruntime.SessionOptions, providers: Sequence[Provider]
) -> list[CaptureBlocker]:
    """The nodes that keep a model out of a CUDA graph; none where it would not load without one, either.

    ONNX Runtime refuses such a model as a whole. Without a graph it takes it, and then tells which nodes it gave to the
    CPU.
    """
    import onnxruntime as ort

    read = read_model(model)
    if read is None:
        return []
    blockers = list(capture_blockers(read.graph))
    plain = [p if isinstance(p, str) else (p[0], {**p[1], "enable_cuda_graph": "0"}) for p in providers]
    try:
        session = ort.InferenceSession(model, options, providers=plain)
    except Exception:  # then a graph is not what it fails for
        return []
    known = {blocker.node for blocker in blockers}
    return blockers + [b for b in off_device(read.graph, nodes_on(session, CPU)) if b.node not in known]


def default_providers(available: Sequence[str]) -> list[str]:
    """Execution providers that are taken where none are named: CUDA where ONNX Runtime and our library both have it."""
    if CUDA in available and build_info()["cuda"] is not None:
        return [CUDA, CPU]
    return [CPU]


def _require_one_wheel() -> None:
    wheels = installed_wheels()
    if len(wheels) > 1:
        found = " and ".join(f"{name} {version}" for name, version in wheels.items())
        raise EnvironmentUnfitError(
            f"{found} are both installed and overwrite each other: uninstall both, then install one"
        )


def require_providers(names: Sequence[str], available: Sequence[str]) -> None:
    """Looks whether execution providers are among those of this ONNX Runtime, and our library has kernels for them.

    Where CUDA is one of them, its libraries are loaded from NVIDIA's packages, if these are installed.

    Raises:
        EnvironmentUnfitError: One is not.
    """
    require_available(names, available)
    if CUDA not in names:
        return
    if build_info()["cuda"] is None:
        raise EnvironmentUnfitError(
            f"{CUDA} was asked for, but our library was built without CUDA and its ops would run on the CPU: "
            "build it with the CUDA toolkit installed"
        )
    load_cuda_libraries()


def require_available(names: Sequence[str], available: Sequence[str]) -> None:
    """Looks whether execution providers are among those of this ONNX Runtime.

    Raises:
        EnvironmentUnfitError: One is not.
    """
    for name in names:
        if name not in available:
            raise EnvironmentUnfitError(
                f"this ONNX Runtime has no {name}, only {', '.join(available)}"
                + (": install onnxruntime-gpu instead of onnxruntime" if name == CUDA else "")
            )


def require_started(names: Sequence[str], started: Sequence[str]) -> None:
    """Looks whether execution providers are among those of a session: ONNX Runtime leaves out what does not start.

    Raises:
        EnvironmentUnfitError: One is not.
    """
    for name in names:
        if name not in started:
            raise EnvironmentUnfitError(
                f"{name} did not start, ONNX Runtime would run the model on {', '.join(started)}: 'ort-moe doctor' "
                "says what is missing"
            )
