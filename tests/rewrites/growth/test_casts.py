"""f(Cast(w)) -> Cast(f(w)): where casts stay. How they sink is tested with the rules that need it."""

from __future__ import annotations

from functools import partial

import pytest

from tests.rewrites.blocks import assert_same, block, fused


@pytest.mark.parametrize(("name", "number"), [("int32", 6), ("int64", 7), ("bool", 9)])
def test_a_rounding_that_shows_is_kept(name: str, number: int) -> None:
    """float16 rounds weights near 2 to 2 and small ones to 0, where integers and booleans jump."""
    text = f"""
        scores = Softmax <axis = -1> (logits)
        raw, ids = TopK (scores, k)
        less = Sub (raw, raw)
        weights = Add (raw, less)
        narrow = Cast <to = 10> (raw)
        jumped = Cast <to = {number}> (narrow)"""
    build = partial(block, text, outputs=f", {name}[T, 2] jumped")
    original, model = build(), build()
    fused(model)
    assert [node.inputs[0].name for node in model.graph if node.outputs[0].name == "jumped"] == ["narrow"]
    assert_same(original, model)
