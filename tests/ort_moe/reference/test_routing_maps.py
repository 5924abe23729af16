"""The reference of the routing maps has the properties that the contract states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ort_moe.reference.routing_maps import routing_maps
from tests.finalize_cases import random_indices


def test_by_hand() -> None:
    indices = np.array([[2, 0], [0, 3], [2, 0]], np.int32)  # three tokens, experts 0 to 2
    maps = routing_maps(indices, 3)
    # Expanded rows k * 3 + t. Expert 0: tokens 0 (k 1), 1 (k 0), 2 (k 1); expert 2: tokens 0 and 2; then what has none.
    assert maps.permuted_to_unpermuted.tolist() == [3, 1, 5, 0, 2, 4]
    assert maps.permuted_to_expert.tolist() == [0, 0, 0, 2, 2, 3]
    assert maps.unpermuted_to_permuted.tolist() == [3, 1, 4, 0, -1, 2]
    assert maps.expert_first_token_offset.tolist() == [0, 3, 3, 5]


@given(
    st.sampled_from(("random", "one_expert", "outside", "none")),
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_properties(choices: str, tokens: int, k: int, experts: int, seed: int) -> None:
    indices = random_indices(choices, (tokens,), k, experts, np.random.default_rng(seed))
    maps = routing_maps(indices, experts)
    rows, offsets = maps.permuted_to_unpermuted, maps.expert_first_token_offset
    assert [array.dtype for array in maps] == [np.int32, np.int32, np.int32, np.int64]
    assert sorted(rows) == list(range(tokens * k))
    inside = (indices >= 0) & (indices < experts)
    assert offsets[0] == 0
    assert offsets[-1] == inside.sum()
    for expert in range(experts):
        members = rows[offsets[expert] : offsets[expert + 1]]
        assert (maps.permuted_to_expert[offsets[expert] : offsets[expert + 1]] == expert).all()
        assert (indices[members % max(tokens, 1), members // max(tokens, 1)] == expert).all()
        order = members % max(tokens, 1) * k + members // max(tokens, 1)  # by token, then by k
        assert (np.diff(order) > 0).all()
    assert (maps.permuted_to_expert[offsets[-1] :] == experts).all()
    has_expert = inside.T.reshape(-1)
    assert (maps.unpermuted_to_permuted[~has_expert] == -1).all()
    assert (rows[maps.unpermuted_to_permuted[has_expert]] == np.nonzero(has_expert)[0]).all()


@pytest.mark.parametrize("leading", [(0,), (2, 0)])
def test_no_tokens(leading: tuple[int, ...]) -> None:
    maps = routing_maps(np.zeros((*leading, 2), np.int32), 5)
    assert [len(array) for array in maps] == [0, 0, 0, 6]
    assert not maps.expert_first_token_offset.any()
