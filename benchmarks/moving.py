"""Kernels that move arrays and compute nothing of use, to hold others against. Written in Triton.

They start by programmatic dependent launch, as ours do: each is on its way before the one ahead of it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from benchmarks import timing

_BLOCK = 4096
_VECTOR = 4  # int32 of a 16-byte access
_NEVER = 0x5BD1E995


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
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
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
        launch_pdl=True,
    )


_KEPT: dict[int, torch.Tensor] = {}


def _kept(blocks: int, device: torch.device) -> torch.Tensor:
    """A float to each block; one array for all calls of a size, so that graphs may hold its address."""
    if blocks not in _KEPT:
        _KEPT[blocks] = torch.empty(blocks, device=device)
    return _KEPT[blocks]


@triton.jit(do_not_specialize=["reads", "writes", "share"])  # type: ignore[untyped-decorator]
def _stream_kernel(source, target, reads, writes, share, NEVER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sizes and a block's share of what is written are in vectors of 16 bytes."""
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    i = block * BLOCK + lane
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(source + i, mask=i < reads * 4, other=0)
    for begin in range(0, share * 4, BLOCK):
        place = begin + lane
        o = block * share * 4 + place
        tl.store(target + o, place.to(tl.int32), mask=(place < share * 4) & (o < writes * 4))
    tl.store(source + i, x, mask=x == NEVER)  # else nobody would need what is read


def moving_time(read_bytes: int, written_bytes: int, *, launches: int = 100, memory_bytes: int = 2 << 30) -> float:
    """Time of a kernel that reads so many bytes and writes so many others, in us, like `timing.graph_time`.

    Args:
        read_bytes: Of one array, which is read in order.
        written_bytes: Of another, each block of threads its share of it.
        launches: Nodes of the graph at most.
        memory_bytes: Of all arrays of the graph at most, but for the first two of each.
    """
    reads, writes = (max(1, -(-each // (4 * _VECTOR))) for each in (read_bytes, written_bytes))
    blocks = max(triton.cdiv(reads * _VECTOR, _BLOCK), triton.cdiv(writes * _VECTOR, _BLOCK))
    count = max(2, min(launches, memory_bytes // (read_bytes + written_bytes)))
    sizes = (max(timing.SPACING // 4, each * _VECTOR) for each in (reads, writes))
    source, target = (torch.zeros(count, size, dtype=torch.int32, device="cuda") for size in sizes)
    share = triton.cdiv(writes, blocks)

    def launch(n: int, _: int) -> None:
        n %= count
        _stream_kernel[(blocks,)](
            source[n], target[n], reads, writes, share, NEVER=_NEVER, BLOCK=_BLOCK, num_warps=8, launch_pdl=True
        )

    return timing.graph_time(launch, launches=max(16, count), repeats=9)
