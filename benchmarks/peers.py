"""Other projects' kernels, called where a package index put them: what is installed is found and loaded, nothing else.

Each is loaded from the one file that holds it, for the packages around them bring whole servers along.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from benchmarks import timing
from benchmarks.output import Measured

SGLANG_TRITON, SGLANG, VLLM = "SGLang Triton + PDL", "SGLang CUDA", "vLLM"
PYTORCH, COMPILED = "PyTorch", "PyTorch, compiled"
ALIGNED = 64
"""Rows to a multiple of which the builders of maps pad each expert's."""

T = TypeVar("T")
Tensor = torch.Tensor
Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Peer(Generic[T]):
    """What a project offers, by the name under which its times are recorded, in the version installed."""

    name: str
    version: str
    call: T


def measure(
    name: str,
    version: str,
    launch: Callable[[int, int], object],
    wrong: Callable[[], float],
    *,
    launches: int,
    repeats: int = 15,
) -> list[Measured]:
    """What a peer takes, as `timing.graph_time` has it, and then how often it is wrong.

    Returns:
        Nothing where it fails, which ends nothing but its own part.
    """
    try:
        return [Measured(name, version, timing.graph_time(launch, launches=launches, repeats=repeats), wrong())]
    except Exception as error:
        print(f"{name} {version} is not timed: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        return []


def installed(distribution: str, file: str) -> tuple[Path, str] | None:
    """Where a distribution's file lies, and the version; None where it is not installed."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(file)))
    return (path, found.version) if path.exists() else None


# --- Routers ---

Route = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes logits (T, E), the selection's bias, and weights (T, K) float32 and indices (T, K) int32 that it may write;
returns the weights and indices, those or others."""


def routers(k: int, attributes: Attributes, compiled: bool = False) -> list[Peer[Route]]:
    """All that are here and can do this router, PyTorch's own ops among them.

    Args:
        k: K.
        attributes: FusedRouter's: a softmax of the chosen, or a sigmoid with groups and a selection's bias.
        compiled: PyTorch's ops by torch.compile, too.
    """
    grouped = "num_groups" in attributes
    bind = functools.partial
    ops = bind(_torch_grouped if grouped else _torch_softmax, k, attributes)
    found: list[Peer[Route]] = [Peer(PYTORCH, torch.__version__, ops)]
    if compiled:
        found.append(Peer(COMPILED, torch.__version__, torch.compile(ops, dynamic=True)))
    if triton := _sglang_triton("moe_fused_gate"):
        found.append(Peer(SGLANG_TRITON, triton[1], bind(_sglang_gate, triton[0], k, attributes)))
    if (version := _sglang_ops()) and not grouped:
        found.append(Peer(SGLANG, version, _sglang_softmax))
    if version := _vllm_ops():
        found.append(Peer(VLLM, version, bind(_vllm_grouped if grouped else _vllm_softmax, k, attributes)))
    return found


def _torch_softmax(k: int, _: Attributes, logits: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    best, ids = torch.topk(logits, k, dim=-1)
    return torch.softmax(best, dim=-1, dtype=torch.float32), ids.to(torch.int32)


def _torch_grouped(k: int, attributes: Attributes, logits: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(logits.float())
    keys = (scores + bias).view(len(logits), attributes["num_groups"], -1)
    group_scores = keys.topk(attributes["group_score_top"], dim=-1).values.sum(-1)
    kept = group_scores.topk(attributes["topk_groups"], dim=-1).indices
    stays = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
    ids = keys.masked_fill(~stays[..., None], attributes["group_fill"]).flatten(1).topk(k, dim=-1).indices
    chosen = scores.gather(1, ids)
    shares = chosen / (chosen.sum(-1, keepdim=True) + attributes["normalize_eps"])
    return shares * attributes["scale"], ids.to(torch.int32)


def _sglang_gate(
    gate: Callable[..., tuple[Tensor, Tensor]],
    k: int,
    attributes: Attributes,
    logits: Tensor,
    bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    if bias is None:
        return gate(logits, None, k, scoring_func="softmax", renormalize=True)
    return gate(
        logits,
        bias,
        k,
        scoring_func="sigmoid",
        renormalize=True,
        routed_scaling_factor=attributes["scale"],
        apply_routed_scaling_factor_on_output=True,
        num_expert_group=attributes["num_groups"],
        topk_group=attributes["topk_groups"],
    )


def _sglang_softmax(logits: Tensor, _: None, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    torch.ops.sgl_kernel.topk_softmax(weights, indices, logits, True, 0.0, None)
    return weights, indices


def _vllm_softmax(
    _: int, __: Attributes, logits: Tensor, ___: None, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    sources = torch.empty_like(indices)
    torch.ops._moe_C.topk_softmax(weights, indices, sources, logits, True, None, None)
    return weights, indices


def _vllm_grouped(k: int, attributes: Attributes, logits: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    groups, kept, scale = (attributes[name] for name in ("num_groups", "topk_groups", "scale"))
    outputs: tuple[Tensor, Tensor] = torch.ops._moe_C.grouped_topk(logits, groups, kept, k, True, scale, bias, 1)
    return outputs


# --- Builders of routing maps ---

Align = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""Takes indices (T, K) and E; returns each choice's number in the order of the experts, each expert's padded to a
multiple of ALIGNED, the expert of every block of ALIGNED, and how many there are."""


def aligners(choices: int, experts: int) -> list[Peer[Align]]:
    """All that are here.

    Args:
        choices: T * K.
        experts: E.
    """
    found: list[Peer[Align]] = []
    few = _sglang_triton("moe_align_small_numel")
    if few and choices <= 64 <= experts:  # where its owner takes it
        found.append(Peer("SGLang Triton + PDL align", few[1], functools.partial(_sglang_align_few, few[0])))
    elif version := _sglang_ops():
        found.append(Peer("SGLang CUDA align", version, _sglang_align))
    if version := _vllm_ops():
        found.append(Peer("vLLM align", version, _vllm_align))
    return found


def _room(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    choices = indices.numel()
    most = choices * ALIGNED if choices <= experts else choices + (experts + 1) * (ALIGNED - 1)
    most = -(-most // 4) * 4
    rows, blocks, count = (
        torch.empty(size, dtype=torch.int32, device="cuda") for size in (most, -(-most // ALIGNED), 1)
    )
    return rows, blocks, count


def _sglang_align_few(align: Callable[..., None], indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    room = _room(indices, experts)
    align(indices, experts + 1, ALIGNED, *room)
    return room


def _sglang_align(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    room = _room(indices, experts)
    sums = torch.empty(experts + 2, dtype=torch.int32, device="cuda")
    torch.ops.sgl_kernel.moe_align_block_size(indices, experts + 1, ALIGNED, *room, sums, True, False)
    return room


def _vllm_align(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    room = _room(indices, experts)
    torch.ops._moe_C.moe_align_block_size(indices, experts, ALIGNED, *room, None, None)
    return room


# --- What brings experts' rows together ---

Finalize = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes rows (R, H), weights (T, K), the row of each choice (T, K) int32, and (T, H) that it may write; returns the
weighted sums, there or elsewhere."""


def finalizers() -> list[Peer[Finalize]]:
    """All that are here, PyTorch's own op among them."""
    version = _vllm_ops()
    found = [Peer(PYTORCH, torch.__version__, _torch_finalize)]
    return [*found, Peer(VLLM, version, _vllm_finalize)] if version else found


def _torch_finalize(rows: Tensor, weights: Tensor, places: Tensor, _: Tensor) -> Tensor:
    shares = weights.to(rows.dtype)
    return torch.nn.functional.embedding_bag(places, rows, mode="sum", per_sample_weights=shares)


def _vllm_finalize(rows: Tensor, weights: Tensor, places: Tensor, y: Tensor) -> Tensor:
    torch.ops._moe_C.moe_unpermute(rows, weights, places, None, weights.shape[1], y)
    return y


# --- Loading ---


@functools.cache
def _vllm_ops() -> str | None:
    """Loads vLLM's ops of MoE layers; returns its version."""
    return _ops("vllm", "vllm/_moe_C_stable_libtorch.abi3.so")


@functools.cache
def _sglang_ops() -> str | None:
    """Loads SGLang's ops for Hopper; returns their version."""
    return _ops("sglang-kernel", "sgl_kernel/sm90/common_ops.abi3.so")


def _ops(distribution: str, file: str) -> str | None:
    if (found := installed(distribution, file)) is None:
        return None
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:  # built for another PyTorch
        print(f"{distribution} {found[1]} is not timed: {str(error).splitlines()[0][:160]}")
        return None
    return found[1]


@functools.cache
def _sglang_triton(name: str) -> tuple[Callable[..., Any], str] | None:
    """A function of SGLang's that launches a kernel in Triton and has its module's name, and the version."""
    if (found := installed("sglang", f"sglang/kernels/ops/moe/{name}.py")) is None:
        return None
    path, version = found
    for package in ("", ".kernels", ".kernels.ops", ".kernels.ops.moe", ".kernels.jit", ".srt"):
        stand_in = types.ModuleType(f"sglang{package}")  # so that the package's own code is not run
        stand_in.__path__ = [str(path.parents[3].joinpath(*package.split(".")))]
        sys.modules.setdefault(stand_in.__name__, stand_in)
    architecture = torch.cuda.get_device_capability()
    compiler = types.ModuleType("sglang.kernels.jit.utils")  # of kernels in C++, which are not called
    compiler.__dict__.update(
        cache_once=functools.cache,
        get_jit_cuda_arch=lambda: types.SimpleNamespace(major=architecture[0], minor=architecture[1]),
        is_arch_support_pdl=lambda: architecture >= (9, 0),
        load_jit=None,
        make_cpp_args=None,
    )
    sys.modules.setdefault(compiler.__name__, compiler)
    return getattr(importlib.import_module(f"sglang.kernels.ops.moe.{name}"), name), version


def load(path: Path) -> ctypes.CDLL:
    """Loads a library, and before it those of NVIDIA's wheels that it needs.

    Functions are looked for when they are called, which ctypes has no option for: a library for a newer cuBLAS loads,
    too, and what needs none of it runs.
    """
    system = ctypes.CDLL(None)
    system.dlopen.restype, system.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
    for _ in range(32):
        handle = system.dlopen(ctypes.c_char_p(str(path).encode()), os.RTLD_LAZY | os.RTLD_GLOBAL)
        if handle is not None:
            return ctypes.CDLL(str(path), handle=handle)
        error = (system.dlerror() or b"").decode()
        missing = re.match(r"(lib[^:/]+): cannot open shared object file", error)
        spec = importlib.util.find_spec("nvidia")
        folders = list(spec.submodule_search_locations or ()) if spec else []
        found = [each for folder in folders for each in Path(folder).rglob(missing[1])] if missing else []
        if not found:
            raise OSError(error)
        load(found[0])
    raise OSError(f"{path} needs more libraries than it could")
