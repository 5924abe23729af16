"""What a sweep says of its rows; PyTorch, which the checkout need not have, is stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.benchmarks.without_torch import imported


@pytest.fixture
def sweep() -> Iterator[Any]:
    with imported("benchmarks.expert_sweep") as module:
        yield module


def row(tokens: int, us: float, load: str = "uniform") -> dict[str, Any]:
    return {"shape": "dense float16 8/2/64/32", "load": load, "tokens": tokens, "layer_us": us}


def test_more_tokens_that_take_less_time_are_named(sweep: Any) -> None:
    rows = [row(4, 9.0), row(1, 5.0), row(2, 10.0), row(4, 12.0, "zipf"), row(2, 12.1, "zipf")]
    assert sweep.slower_than_more(rows) == [
        "dense float16 8/2/64/32, uniform: T = 2 takes 10.00 us, T = 4 takes 9.00",
    ]


def test_a_stack_passes_the_cache_with_few_tokens_and_ends_soon_with_many(sweep: Any) -> None:
    layers = [sweep.layers_of(tokens) for tokens in sweep.TOKENS]
    assert layers == sorted(layers, reverse=True)
    assert (layers[0], layers[-1]) == (8, 2)
