"""The C++ of the documentation compiles, where a compiler and ONNX Runtime's headers are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_snippets import PAGES, ROOT, Snippet, snippets

HEADERS = ROOT / "build" / "ort-headers"
PROGRAMS = [(page, s) for page in PAGES for s in snippets(page) if s.language == "cpp" and "int main" in s.body]

WITHOUT_CUDA = """
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaMalloc(void**, unsigned long), cudaFree(void*), cudaMemset(void*, int, unsigned long);
cudaError_t cudaMemcpy(void*, const void*, unsigned long, cudaMemcpyKind), cudaDeviceSynchronize();
"""
"""What the programs use of cuda_runtime_api.h."""


def test_there_is_one() -> None:
    assert [page.name for page, _ in PROGRAMS] == ["decode_loop.md"]


@pytest.mark.skipif(not (HEADERS / "onnxruntime_cxx_api.h").exists(), reason="no headers of ONNX Runtime")
@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("compiler", ["g++", "nvcc"])
def test_programs_compile(page: Path, program: Snippet, compiler: str, tmp_path: Path) -> None:
    """With CUDA's own headers by nvcc."""
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"no {compiler}")
    source = tmp_path / "program.cc"
    source.write_text(program.body)
    command = [found, "-std=c++17", f"-I{HEADERS}", "-c", str(source), "-o", str(tmp_path / "program.o")]
    if compiler == "g++":
        (tmp_path / "cuda_runtime_api.h").write_text(WITHOUT_CUDA)
        command += ["-Wall", "-Wextra", "-Werror", f"-I{tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{page.name}:{program.line}\n{done.stderr}"
