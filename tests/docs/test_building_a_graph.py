"""What the page of graphs of one's own says of `ort-moe verify`, of the graph that it builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from ort_moe.packing import nvfp4
from ort_moe.verification import verify
from tests.docs.test_snippets import ROOT, snippets


@pytest.mark.parametrize("stood_for", [True, False])
def test_a_packed_graph_is_held_against_what_its_codes_stand_for(
    stood_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it passes, and beside the weights that were quantized it fails."""
    original: dict[int, Any] = {}
    quantize = nvfp4.quantize

    def remembered(weights: Any) -> nvfp4.Nvfp4:
        packed = quantize(weights)
        original[id(packed.weights)] = weights
        return packed

    monkeypatch.setattr(nvfp4, "quantize", remembered)
    (snippet,) = snippets(ROOT / "docs" / "building_a_graph.md")
    page: dict[str, Any] = {}
    exec(snippet.body, page)
    onnx.save(page["model"], tmp_path / "packed.onnx")
    constants = {
        f"{fc}_weights": nvfp4.dequantize(packed) if stood_for else original[id(packed.weights)]
        for fc, packed in page["weights"].items()
    }
    ffn = page["node"](
        page["FUSED_EXPERTS"],
        {"x": "x", "residual": "x"} | page["routed"] | {name: name for name in constants},
        {"y": "y"},
        {"weight_format": "dense", "activation": "silu", "gated": 1},
    )
    dense = onnx.ModelProto()
    dense.CopyFrom(page["model"])
    del dense.graph.node[1], dense.graph.initializer[:]
    dense.graph.node.append(ffn)
    dense.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    onnx.save(dense, tmp_path / "dense.onnx")
    assert verify(tmp_path / "dense.onnx", tmp_path / "packed.onnx").passed == stood_for
