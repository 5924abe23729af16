"""The command that benchmarks of one kernel share: every shape at every number of tokens, one table, one JSON file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from benchmarks import timing
from benchmarks.output import add_json, publish, wrong_answers


class Named(Protocol):
    """A shape of a benchmark."""

    @property
    def name(self) -> str: ...


S = TypeVar("S", bound=Named)

MOST_KEPT_BYTES = 32 << 30
"""Of the GPU's memory, from row to row."""


def parser(doc: str | None, tokens: Sequence[int]) -> argparse.ArgumentParser:
    """The options that all have.

    Args:
        doc: The module's docstring; its first line tells what is compared.
        tokens: The numbers of tokens unless others are asked for.
    """
    options = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add_json(options)
    options.add_argument("--tokens", type=int, nargs="+", default=tokens)
    options.add_argument("--only", help="shapes whose name contains this")
    return options


def add_compiled(options: argparse.ArgumentParser) -> None:
    """The option of those that have PyTorch's ops for a peer."""
    options.add_argument("--compiled", action="store_true", help="time PyTorch's ops through torch.compile, too")


def run(
    args: argparse.Namespace,
    shapes: Iterable[S],
    measure: Callable[[S, int, float], dict[str, Any]],
    columns: Mapping[str, str],
    also: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measures every shape at every number of tokens, prints and writes.

    Args:
        args: What `parser` made of the command line.
        shapes: All, of which `--only` may choose.
        measure: One row, of a shape, a number of tokens and the bandwidth of a large copy in GB/s.
        columns: Keys of the rows by heading, the row's name first.
        also: What to say of the environment besides.

    Returns:
        The rows.
    """
    return run_pairs(args, [(shape, tokens) for shape in shapes for tokens in args.tokens], measure, columns, also)


def run_pairs(
    args: argparse.Namespace,
    pairs: Iterable[tuple[S, int]],
    measure: Callable[[S, int, float], dict[str, Any]],
    columns: Mapping[str, str],
    also: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The same of given pairs of a shape and a number of tokens."""
    timing.require_gpu()
    torch.manual_seed(0)
    copy_gbps = timing.copy_bandwidth()
    rows = []
    for shape, tokens in pairs:
        if args.only is None or args.only in shape.name:
            rows.append(measure(shape, tokens, copy_gbps))
            if torch.cuda.memory_reserved() > MOST_KEPT_BYTES:  # of graphs that are gone, which nothing else would use
                torch.cuda.empty_cache()
    if not rows:  # nothing that a record should make room for
        print(f"no shape's name contains '{args.only}'")
        return rows
    environment = timing.environment() | {"copy_gbps": round(copy_gbps, 1)} | dict(also or {})
    wrong = wrong_answers(rows)
    publish(rows, columns, environment, args.json, {"wrong_peers": wrong} if wrong else None)
    return rows
