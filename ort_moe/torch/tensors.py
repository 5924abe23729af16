"""What the kernels are told of a tensor, and what is checked of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ort_moe.kernels.training import MAP_FORMATS

TYPES: Mapping[torch.dtype, str] = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Types of logits and probs, and their ONNX names."""

COUNT_TYPES: Mapping[torch.dtype, str] = {torch.int32: "int32", torch.int64: "int64", torch.float32: "float"}
"""Types of counts, and their ONNX names."""


def check_logits(op: str, name: str, tensor: torch.Tensor) -> None:
    """Checks the type and rank of a tensor with a value per expert in each row.

    Raises:
        ValueError: It is not what the op takes.
    """
    if tensor.dtype not in TYPES:
        raise ValueError(f"{op}: '{name}' must be float32, float16 or bfloat16, but is {_name(tensor.dtype)}")
    if tensor.ndim < 1:
        raise ValueError(f"{op}: '{name}' must have rank 1 or more, but is a scalar")
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{op}: '{name}' must be on the CPU or a CUDA device, but is on {tensor.device}")


def check_expert_vector(op: str, name: str, vector: torch.Tensor | None, logits: torch.Tensor) -> None:
    """Checks a float32 vector with a value per expert, where it is given.

    Raises:
        ValueError: It is not what the op takes.
    """
    if vector is not None:
        _check(op, name, vector, (torch.float32,), list(logits.shape[-1:]), logits)


def check_counts(name: str, counts: torch.Tensor, probs: torch.Tensor, shape: list[int]) -> None:
    """Checks counts of tokens for AuxLoss.

    Raises:
        ValueError: They are not what the op takes.
    """
    _check("AuxLoss", name, counts, tuple(COUNT_TYPES), shape, probs)


def _check(
    op: str, name: str, tensor: torch.Tensor, types: Sequence[torch.dtype], shape: list[int], beside: torch.Tensor
) -> None:
    if tensor.dtype not in types:
        raise ValueError(f"{op}: '{name}' must be {' or '.join(map(_name, types))}, but is {_name(tensor.dtype)}")
    if list(tensor.shape) != shape:
        raise ValueError(f"{op}: '{name}' must have shape {shape}, but has {list(tensor.shape)}")
    if tensor.device != beside.device:
        raise ValueError(f"{op}: '{name}' must be on {beside.device}, but is on {tensor.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def map_shape(shape: Sequence[int], map_format: str) -> tuple[int, ...]:
    """The shape of a map beside logits of that shape.

    Raises:
        ValueError: There is no such format.
    """
    if map_format not in MAP_FORMATS:
        raise ValueError(f"map_format must be one of {', '.join(MAP_FORMATS)}, but is {map_format!r}")
    experts = int(shape[-1])
    return (*shape[:-1], experts if map_format == "byte" else -(-experts // 8))


def map_type(map_format: str) -> torch.dtype:
    """The type of a map."""
    return torch.bool if map_format == "byte" else torch.uint8


def sizes(tensor: torch.Tensor) -> dict[str, Any]:
    """The launchers' keywords for the shape and type of logits or probs."""
    *leading, experts = tensor.shape
    return {"rows": math.prod(leading), "experts": experts, "dtype": TYPES[tensor.dtype]}


def where(tensor: torch.Tensor) -> dict[str, Any]:
    """The launchers' keywords for the place of a tensor: the current stream, or PyTorch's number of threads."""
    if tensor.is_cuda:
        return {"stream": torch.cuda.current_stream(tensor.device).cuda_stream}
    return {"cpu_threads": torch.get_num_threads()}


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of a CUDA tensor the current one."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def address(tensor: torch.Tensor) -> int:
    """Where a contiguous tensor lies."""
    return tensor.data_ptr()
