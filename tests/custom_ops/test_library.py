"""The native library from outside: its exports, what it says of itself, and its registration."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import onnxruntime
import pytest

from ort_moe.installation import library
from tests.router_models import router_model

SOFTMAX: dict[str, Any] = {"k": 2, "score": "softmax"}


def test_every_op_has_a_cpu_kernel_and_cuda_where_it_is_built() -> None:
    devices = ["CPUExecutionProvider"] + ["CUDAExecutionProvider"] * (library.build_info()["cuda"] is not None)
    assert all(op["providers"] == devices for op in library.describe_ops()["ops"])


def test_build_info() -> None:
    info = library.build_info()
    assert set(info) == {"version", "cuda", "ort_api_version", "compiler"}
    assert info["ort_api_version"] >= 18
    if info["cuda"] is not None:
        assert set(info["cuda"]) == {"toolkit", "architectures"}


def test_only_our_symbols_are_exported() -> None:
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", library.library_path()], check=True, capture_output=True, text=True
    ).stdout
    symbols = [line.split()[-1] for line in listing.splitlines()]
    assert "RegisterCustomOps" in symbols
    assert [s for s in symbols if s != "RegisterCustomOps" and not s.startswith("ort_moe_")] == []


def test_neither_onnxruntime_nor_the_cuda_and_cpp_runtimes_are_linked() -> None:
    listing = subprocess.run(
        ["readelf", "--dynamic", library.library_path()], check=True, capture_output=True, text=True
    ).stdout
    needed = [line.partition("[")[2].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line]
    assert needed
    assert [n for n in needed if n.startswith(("libonnxruntime", "libcudart", "libstdc++", "libgcc"))] == []


def test_registering_again_changes_nothing() -> None:
    options = onnxruntime.SessionOptions()
    library.register(options)
    library.register(options)
    options.register_custom_ops_library(str(library.library_path()))
    model = router_model(SOFTMAX, logits_shape=(1, 4))
    for _ in range(2):
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        assert [output.shape for output in session.get_outputs()] == [[1, 2], [1, 2]]


def test_sessions_share_one_set_of_ops() -> None:
    """Also those that outlive the options they were created with, and after others are gone."""
    model = router_model(SOFTMAX, logits_shape=("T", 4)).SerializeToString()
    sessions = []
    for _ in range(20):
        options = onnxruntime.SessionOptions()
        library.register(options)
        sessions.append(onnxruntime.InferenceSession(model, options))
        if len(sessions) > 3:
            del sessions[0]
    logits = onnxruntime.OrtValue.ortvalue_from_shape_and_type([0, 4], "float32")
    for session in sessions:
        assert session.run_with_ort_values(["weights"], {"logits": logits})[0].shape() == [0, 2]


_CreateStatus = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
_GetApi = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
_GetVersionString = ctypes.CFUNCTYPE(ctypes.c_void_p)


class _Api(ctypes.Structure):
    """OrtApi of the C API starts so, in every version."""

    _fields_ = (("create_status", _CreateStatus),)


class _ApiBase(ctypes.Structure):
    """OrtApiBase of the C API."""

    _fields_ = (("get_api", _GetApi), ("get_version_string", _GetVersionString))


@pytest.mark.parametrize(
    ("version", "newest_api"),
    [
        ("1.16.3", 16),  # too old
        ("1.99.0", 17),  # says more than it does
    ],
)
def test_an_ort_without_our_api_gets_an_error_and_not_success(version: str, newest_api: int) -> None:
    messages: list[str] = []
    version_string = ctypes.create_string_buffer(version.encode())

    @_CreateStatus
    def create_status(_code: int, message: bytes) -> int:
        messages.append(message.decode())
        return 8

    api = _Api(create_status)
    base = _ApiBase(
        _GetApi(lambda asked: ctypes.addressof(api) if asked <= newest_api else 0),
        _GetVersionString(lambda: ctypes.addressof(version_string)),
    )
    register = ctypes.CDLL(str(library.library_path())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    options = ctypes.c_void_p(8)  # never looked at
    assert register(options, ctypes.byref(base)) == 8
    assert messages == [f"ort_moe needs the C API of ONNX Runtime 1.18, which ONNX Runtime {version} lacks"]
