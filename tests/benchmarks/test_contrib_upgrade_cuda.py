"""Models of contrib ops answer the same on a GPU once they are taken apart: small layers of every format."""

from __future__ import annotations

import pytest

from benchmarks.expert_models import Shape

pytestmark = pytest.mark.gpu

SHAPES = {name: Shape(16, 4, 256, 128, name) for name in ("nvfp4", "mxfp4", "dense")}
SHAPES |= {name: Shape(16, 4, 256, 128, name, "float16", 64) for name in ("int4", "int8")}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_answers_agree(shape: Shape) -> None:
    from benchmarks.contrib_upgrade import measure
    from benchmarks.experts import STACK_TOLERANCE

    for tokens in (1, 100):
        row = measure(shape, tokens, 1000.0)
        assert 0 <= row["difference_from_contrib"] <= STACK_TOLERANCE[shape.dtype]
        assert min(row["contrib_us"], row["upgraded_us"]) > 0
