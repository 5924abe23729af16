"""Where steps of two models can be compared."""

from __future__ import annotations

import numpy as np
import pytest

from tests.genai_steps import Steps

STEPS, POSITIONS, LAYERS, EXPERTS, K = 3, 5, 2, 4, 2


def _steps(other_choice: tuple[int, int] | None = None) -> Steps:
    """Routers that choose the first two experts, but for one of a position and a layer."""
    routers = np.broadcast_to(np.arange(EXPERTS, 0, -1.0), (POSITIONS, LAYERS, EXPERTS)).copy()
    if other_choice is not None:
        routers[other_choice] = routers[other_choice][::-1]
    return Steps(np.zeros((STEPS, 8)), routers)


def test_of_two_that_choose_the_same() -> None:
    logits, routers = _steps().comparable(_steps(), K)
    np.testing.assert_array_equal(logits, np.ones(STEPS, bool))
    np.testing.assert_array_equal(routers, np.ones((POSITIONS, LAYERS), bool))


@pytest.mark.parametrize("position", range(POSITIONS))
def test_another_choice_before_other_layers(position: int) -> None:
    """They bring it into all that follows; what chose had the same to choose by."""
    logits, routers = _steps().comparable(_steps((position, 0)), K)
    expected = np.arange(POSITIONS) < position
    np.testing.assert_array_equal(routers, np.stack([np.ones_like(expected), expected], axis=1))
    np.testing.assert_array_equal(logits, expected[-STEPS:])


@pytest.mark.parametrize("position", range(POSITIONS))
def test_another_choice_in_the_last_layer(position: int) -> None:
    """It changes the logits of its token alone."""
    logits, routers = _steps().comparable(_steps((position, 1)), K)
    assert routers.all()
    np.testing.assert_array_equal(logits, (np.arange(POSITIONS) != position)[-STEPS:])


def test_an_order_is_no_choice() -> None:
    other = _steps()
    other.routers[..., :K] = other.routers[..., :K][..., ::-1]
    assert all(where.all() for where in _steps().comparable(other, K))
