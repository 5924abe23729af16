"""Models that are measured in tests."""

from __future__ import annotations

import onnx
from onnx import helper

import models.fixtures
from tests.ort_moe.tiny_models import original

EXPORT = models.fixtures.get("qwen3_moe_block_dynamo_fp32").path


def not_loadable() -> onnx.ModelProto:
    """A block with an operator that nobody knows."""
    model = original()
    model.graph.node.append(helper.make_node("Unknown", ["output"], ["changed"], name="odd", domain="elsewhere"))
    model.graph.output[0].name = "changed"
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    return model
