"""Weights that two nodes read are never stored a second time."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from ort_moe.optimization.optimize import optimize
from tests.contrib_models import ContribCase


def two_nodes(case: ContribCase, second_k: int = 3) -> onnx.ModelProto:
    """Two nodes of the same weights."""
    proto = case.model()
    second = onnx.NodeProto()
    second.CopyFrom(proto.graph.node[0])
    second.name, second.output[0] = "moe2", "y2"
    (k,) = [attribute for attribute in second.attribute if attribute.name == "k"]
    k.i = second_k
    proto.graph.node.append(second)
    proto.graph.output.append(helper.make_tensor_value_info("y2", TensorProto.FLOAT, None))
    return proto


@pytest.mark.parametrize("second_k", [3, 99])
@pytest.mark.parametrize(
    ("case", "is_shared"),
    [
        (ContribCase(), True),
        (ContribCase(weight_format="int4"), True),
        (ContribCase(weight_format="int4", layout="rows"), False),  # scales made anew
        (ContribCase(weight_format="nvfp4", layout="K", prepacked=1), False),  # weights in another shape
        (ContribCase(weight_format="nvfp4", layout="N"), False),  # weights made anew
        (ContribCase(weight_format="mxfp4", layout="K"), False),  # scales as another type
    ],
    ids=str,
)
def test_two_nodes(case: ContribCase, is_shared: bool, second_k: int, tmp_path: Path) -> None:
    source, output = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(two_nodes(case, second_k), source)
    report = optimize(source, output, target="cpu", verify=False)
    statuses = ["whole" if is_shared else "left", "whole" if is_shared and second_k == 3 else "left"]
    assert [site.status for site in report.experts] == statuses
    reasons = [finding.reason.slug for site in report.experts for finding in site.findings]
    expected = set() if is_shared else {"expert-weights-shared"}
    assert set(reasons) == (expected if second_k == 3 else expected | {"contrib-form"})
    stored = [sum(len(tensor.raw_data) for tensor in onnx.load(path).graph.initializer) for path in (source, output)]
    assert stored[1] <= stored[0] + 64  # shapes of views
