"""Packed experts in the place of a contrib node are held to what their codes stand for, as those of any other layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import ort_moe
from ort_moe.verification import Verification, verify
from ort_moe.verification.packed_reference import END_TO_END
from tests.contrib_models import ContribCase
from tests.ort_moe.published_schemas import check
from tests.ort_moe.verification.contrib_layers import damaged, layers, saved, tied_layer

OPTIONS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "mxfp4": {},
    "fp8": {"block_size": 16},
    "int8": {"block_size": 32},
    "int4": {"block_size": 16, "zero_points": True},
}


def packed(case: ContribCase, folder: Path, weights: str = "nvfp4", count: int = 1) -> tuple[Path, Path]:
    """The contrib nodes, and what replaces them, with packed weights and not verified."""
    source, output = saved(layers(case, count), folder / "model.onnx"), folder / "out.onnx"
    ort_moe.optimize(source, output, target="cpu", weights=weights, verify=False, **OPTIONS[weights])
    return source, output


def only(verification: Verification) -> Any:
    (site,) = verification.sites
    assert (site.node, site.what) == ("moe0", "contrib block")
    return site


@pytest.mark.parametrize("weights", OPTIONS)
@pytest.mark.parametrize("case", [ContribCase(rank=3), ContribCase("gelu", None, dtype="float16")], ids=str)
def test_what_the_codes_stand_for_is_computed(case: ContribCase, weights: str, tmp_path: Path) -> None:
    source, output = packed(case, tmp_path, weights, count=2)
    verification = verify(source, output)
    assert verification.failure is None
    for site in verification.sites:
        # By function bodies, which run the fewest rows.
        assert (site.status, site.rows, site.what) == ("passed", 1 + (4 if case.rank == 3 else 3) + 4, "contrib block")
        assert site.difference <= (2e-5 if case.dtype == "float32" else 6e-3)  # of roundings, not of the codes
        assert site.change is not None
        assert 0 < site.change < 0.4
    assert f"allowed end to end: {END_TO_END[weights]:g}; " in str(verification)
    assert f"(allowed {END_TO_END[weights]:g})" in verification.summary
    check("verify", verification.to_dict())


@pytest.mark.parametrize(
    "case",
    [
        ContribCase(fusion=2, bias=True),  # spelled with gate and value in turn for the CPU
        ContribCase("silu", None, separate=True, dtype="float16"),  # fc1 and fc3 become one
        ContribCase(fusion=2, dtype="bfloat16", rank=3),  # runs widened
        ContribCase(bias=True, attributes={"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7}),
        ContribCase("relu", None, normalize=0, k=1),
    ],
    ids=str,
)
def test_forms(case: ContribCase, tmp_path: Path) -> None:
    verification = verify(*packed(case, tmp_path))
    assert verification.failure is None
    site = only(verification)
    assert site.status == "passed"
    assert site.change is not None
    assert site.difference <= 4e-2


def test_by_bodies_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = packed(ContribCase(), tmp_path)
    monkeypatch.setattr("ort_moe.verification.comparison.library_is_there", lambda: False)
    site = only(verify(*models))
    assert (site.status, site.change is not None) == ("passed", True)


@pytest.mark.parametrize(
    ("attribute", "value", "told"),
    [
        ("normalize", 0, "with the original's weights, rows differ by"),
        ("k", 3, "with the original's weights, rows differ by"),
        ("beta", 0.05, "with the original's weights, rows differ by"),
    ],
)
def test_a_wrong_attribute_is_found(attribute: str, value: Any, told: str, tmp_path: Path) -> None:
    """Each changes rows by less than packing may."""
    source, output = packed(ContribCase(), tmp_path)
    model = ir.load(output)
    wrong = next(node for node in model.graph if node.domain == "ort_moe" and attribute in node.attributes)
    wrong.attributes[attribute] = ir.Attr(attribute, wrong.attributes[attribute].type, value)
    for node in model.graph:
        node.overload = ""
        for output_value in node.outputs:
            output_value.shape = None
    model.functions.clear()
    ir.save(model, tmp_path / "wrong.onnx")
    failure = verify(source, tmp_path / "wrong.onnx").failure
    assert failure is not None
    assert failure.startswith(f"the first contrib block that differs is moe0: by our kernels: {told}")


@pytest.mark.parametrize("name", ["gated", "fc2_weights_nvfp4_weights"])
def test_what_does_not_go_together_is_told(name: str, tmp_path: Path) -> None:
    source, output = packed(ContribCase(), tmp_path)
    model = ir.load(output)
    node = next(node for node in model.graph if "gated" in node.attributes)
    if name == "gated":
        node.attributes["gated"] = ir.AttrInt64("gated", 0)
        node.overload = ""
    else:
        value = model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy()[..., :-8], name=name)
    ir.save(model, tmp_path / "wrong.onnx")
    site = only(verify(source, tmp_path / "wrong.onnx"))
    assert site.status == "failed"
    assert ("by our kernels: " if name == "gated" else "of other shapes than the original's") in site.detail


def test_packed_anew_is_told(tmp_path: Path) -> None:
    """What the other model's codes were made of is not in the reference."""
    _, output = packed(ContribCase(), tmp_path, "int8")
    source = saved(layers(ContribCase(weight_format="int4", layout="rows"), 1), tmp_path / "codes.onnx")
    site = only(verify(source, output))
    assert site.status == "skipped"
    assert site.detail == "its weights were packed, and the original's weights are packed, too, in int4"


def test_codes_that_are_the_originals_own_are_held_as_any_block_is(tmp_path: Path) -> None:
    """Our node and the contrib node that it becomes have the same codes."""
    _, output = packed(ContribCase(), tmp_path, "int8")
    contrib = tmp_path / "contrib.onnx"
    ort_moe.optimize(output, contrib, target="contrib", verify=False)
    assert only(verify(contrib, output)).status == "passed"
    failure = verify(contrib, damaged(output, "fc2_weights_int8_scales", 1.5)).failure
    assert failure is not None
    assert "by our kernels: rows differ by" in failure


def test_wrong_biases_are_found(tmp_path: Path) -> None:
    source, output = packed(ContribCase(bias=True), tmp_path)
    failure = verify(source, damaged(output, "fc2_bias", 1.05)).failure
    assert failure is not None
    assert "by our kernels: with the original's weights, rows differ by" in failure


def test_kernels_are_held_to_the_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is off by is less than packing changes, and more than roundings are."""
    from ort_moe.verification import experts_check

    models = packed(ContribCase(), tmp_path)
    real = experts_check.meant
    monkeypatch.setattr(experts_check, "meant", lambda node, feeds: real(node, feeds) * 1.01)
    site = only(verify(*models))
    assert site.status == "failed"
    assert site.detail.startswith("by our kernel: rows differ by")


@pytest.mark.parametrize(
    ("weights", "constant", "factor", "layer"),
    [
        ("nvfp4", "fc2_weights_nvfp4_global_scale", 1.3, "fc2"),
        ("nvfp4", "fc1_weights_nvfp4_scales", 0.75, "fc1"),
        ("fp8", "fc1_weights_fp8_scales", 1.1, "fc1"),
        ("int4", "fc2_weights_int4_scales", 1.2, "fc2"),
        ("int8", "fc2_weights_int8_scales", 1.03, "fc2"),
    ],
)
def test_codes_of_other_weights_are_found(
    weights: str, constant: str, factor: float, layer: str, tmp_path: Path
) -> None:
    """They change rows by less than packing may."""
    source, output = packed(ContribCase(), tmp_path, weights)
    change = only(verify(source, output)).change
    site = only(verify(source, damaged(output, constant, factor)))
    assert site.status == "failed"
    assert site.change > change
    assert site.detail.startswith(f"its weights were packed to {weights}, which changes one of {layer} of expert ")
    assert "of the largest of its block (allowed " in site.detail


def test_rows_near_ties_prove_nothing(tmp_path: Path) -> None:
    source = saved(tied_layer(), tmp_path / "model.onnx")
    ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu", weights="int8", block_size=32, verify=False)
    model = onnx.load(tmp_path / "out.onnx")
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "beta":
                attribute.f = 0.5
        node.overload = ""
    del model.functions[:]
    verification = verify(source, saved(model, tmp_path / "wrong.onnx"))
    site = only(verification)
    assert (site.status, site.near_ties) == ("skipped", 1 + 3 + 8)
    assert not verification.passed
