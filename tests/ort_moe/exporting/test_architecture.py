"""Which architectures can be exported, by what their classes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.architectures import ARCHITECTURES
from ort_moe.errors import ModelError
from ort_moe.exporting.checkpoint import Checkpoint

pytestmark = pytest.mark.export

REFUSED = {"deepseek_v4", "inkling_text", "llama4_text", "minimax", "mistral4", "zaya"}
"""Of those that fixtures are made of; the documentation tells them."""


@pytest.mark.parametrize("name", [row.name for row in ARCHITECTURES])
def test_architecture(tmp_path: Path, name: str) -> None:
    from models.checkpoint import write_checkpoint
    from ort_moe.exporting.architecture import Architecture

    write_checkpoint(name, tmp_path)
    if name in REFUSED:
        with pytest.raises(ModelError, match=f"'{name}' cannot be exported: "):
            Architecture.of(Checkpoint.of(tmp_path))
        return
    found = Architecture.of(Checkpoint.of(tmp_path))
    assert found.moe_layers == (1 if name == "nemotron_h" else 2)
    assert len(found.layers) == 2
    assert found.longest == 64
    assert any(found.layers)
