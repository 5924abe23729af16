"""Which architectures can be exported, by what their classes say."""

from __future__ import annotations

import json
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


def test_a_configuration_of_a_far_larger_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 45 billion weights, which are not made in memory before it is told."""
    import transformers

    from models.checkpoint import write_checkpoint
    from ort_moe.exporting.export import export

    def from_pretrained(*_: object, **__: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    write_checkpoint("mixtral", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | sizes))
    with pytest.raises(
        ModelError, match=r"model: its weights do not fit its config\.json, by which they are \d{11} num.*"
    ):
        export(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
