"""A kernel that moves arrays and computes nothing of use, to hold others against. Written in Triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    map_in,
    out,
    map_out,
    kept,
    n,
    READS: tl.constexpr,
    MAP_IN: tl.constexpr,
    WRITES: tl.constexpr,
    MAP_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.zeros([BLOCK], tl.float32)
    if READS > 0:
        x += tl.load(a + i, mask=inside, other=0.0).to(tl.float32)
    if READS > 1:
        x += tl.load(b + i, mask=inside, other=0.0).to(tl.float32)
    if MAP_IN:
        x += tl.load(map_in + i, mask=inside, other=0).to(tl.float32)
    if WRITES:
        tl.store(out + i, x.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(kept + tl.program_id(0), tl.sum(x))  # else nobody would need what is read
    if MAP_OUT:
        tl.store(map_out + i, (x > 2.0).to(tl.uint8), mask=inside)


def move(
    arrays: Sequence[torch.Tensor],
    map_in: torch.Tensor | None,
    out: torch.Tensor | None,
    map_out: torch.Tensor | None,
) -> None:
    """Reads the arrays, up to two, and `map_in`, and writes `out` and `map_out`, on torch's current stream.

    Args:
        arrays: Of one shape and type.
        map_in: uint8 of that shape.
        out: Of that shape.
        map_out: uint8 of that shape.
    """
    given = [tensor for tensor in (*arrays, out, map_in, map_out) if tensor is not None]
    n, any_ = given[0].numel(), given[0]
    blocks = triton.cdiv(n, _BLOCK)
    _move_kernel[(blocks,)](
        arrays[0] if arrays else any_,
        arrays[1] if len(arrays) > 1 else any_,
        any_ if map_in is None else map_in,
        any_ if out is None else out,
        any_ if map_out is None else map_out,
        _kept(blocks, any_.device),
        n,
        READS=len(arrays),
        MAP_IN=map_in is not None,
        WRITES=out is not None,
        MAP_OUT=map_out is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


_KEPT: dict[int, torch.Tensor] = {}


def _kept(blocks: int, device: torch.device) -> torch.Tensor:
    """A float to each block; one array for all calls of a size, so that graphs may hold its address."""
    if blocks not in _KEPT:
        _KEPT[blocks] = torch.empty(blocks, device=device)
    return _KEPT[blocks]
