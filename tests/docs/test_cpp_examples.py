"""The C++ of the documentation compiles, where a compiler and ONNX Runtime's headers are, and does what Python does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_snippets import PAGES, ROOT, Snippet, snippets

HEADERS = ROOT / "build" / "ort-headers"
PROGRAMS = [s for page in PAGES for s in snippets(page) if s.language == "cpp" and "int main" in s.body]
DECODE_LOOP = ROOT / "docs" / "decode_loop.md"

ON_THE_HOST = """
#include <cstdlib>
#include <cstring>
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t done(void*) { return cudaSuccess; }
inline cudaError_t cudaMalloc(void** data, size_t size) { return done(*data = std::malloc(size)); }
inline cudaError_t cudaFree(void* data) { return std::free(data), cudaSuccess; }
inline cudaError_t cudaMemset(void* data, int value, size_t size) { return done(std::memset(data, value, size)); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return done(std::memcpy(to, from, size));
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
"""
"""What the programs use of cuda_runtime_api.h, with the host's memory for the device's."""

pytestmark = pytest.mark.skipif(
    not (HEADERS / "onnxruntime_cxx_api.h").exists(), reason="no headers of ONNX Runtime in build/ort-headers"
)


def compiled(program: str, compiler: str, folder: Path, *arguments: str) -> None:
    """Compiles a program with warnings as errors."""
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler}")
    source = folder / "program.cc"
    source.write_text(program)
    command = [found, "-std=c++17", f"-I{HEADERS}", str(source), *arguments]
    if compiler != "nvcc":
        (folder / "cuda_runtime_api.h").write_text(ON_THE_HOST)
        command += ["-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_programs_are_found() -> None:
    assert [program.page.name for program in PROGRAMS] == ["decode_loop.md"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.page.name)
def test_programs_compile_with_cudas_headers(program: Snippet, tmp_path: Path) -> None:
    compiled(program.body, "nvcc", tmp_path, "-c", "-o", str(tmp_path / "program.o"))


def test_the_decode_loop_does_what_python_does(tmp_path: Path) -> None:
    """On the CPU: without the lines that ask for CUDA, and with the host's memory for the device's."""
    import onnxruntime

    from ort_moe import library_path

    make, generate = [s for s in snippets(DECODE_LOOP) if s.language == "python" and not s.needs][:2]
    make.run(tmp_path, dict(os.environ))
    python = subprocess.run([sys.executable, "-c", generate.body], cwd=tmp_path, capture_output=True, text=True)
    text = python.stdout.splitlines()[-1].strip("[]").replace(",", "")
    assert len(text.split()) == 16

    (program,) = (p.body for p in PROGRAMS if p.page == DECODE_LOOP)
    before, _, rest = program.partition("  OrtCUDAProviderOptionsV2*")
    _, session, after = rest.partition("  Ort::Session session")
    assert '"Cuda"' in before
    program = before.replace('"Cuda"', '"Cpu"') + session + after
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("this wheel of ONNX Runtime has no library that a program can be linked with")
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # the name by which it is looked for
    compiled(program, "g++", tmp_path, str(library), f"-Wl,-rpath,{tmp_path}", "-o", str(tmp_path / "decode"))
    done = subprocess.run(
        [tmp_path / "decode", "decode.onnx", library_path()], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == text
