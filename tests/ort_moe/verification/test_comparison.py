"""Verification passes what is right, and names what is wrong."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import models.fixtures
from ort_moe.errors import EnvironmentUnfitError, ModelError
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, VERSION
from ort_moe.rewrites import rewrite
from ort_moe.verification import Verification, verify
from ort_moe.verification.comparison import MOST_DRAWS
from ort_moe.verification.sample_inputs import Shape
from tests.decode_models import BATCH, LENGTH, decode_model
from tests.ort_moe.tiny_models import CHOSEN, EXPERTS, HIDDEN, SITE, fused, original, save
from tests.rewrites.blocks import block


def _verify(tmp_path: Path, wrong: str | None = None, dtype: Any = np.float32, **options: Any) -> Verification:
    reference = save(original(dtype, **options), tmp_path / "reference.onnx")
    return verify(reference, save(fused(dtype, wrong=wrong, **options), tmp_path / "optimized.onnx"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_passes_the_right_model(tmp_path: Path, dtype: Any) -> None:
    verification = _verify(tmp_path, dtype=dtype)
    assert verification.failure is None
    (site,) = verification.sites
    assert (site.node, site.status, site.rows) == (SITE, "passed", 1 + 3 + 64)  # tokens is no batch: 1, 3, 64
    assert [(s.shape, s.status) for s in verification.shapes] == [
        (Shape(1, 1), "passed"),
        (Shape(2, 3), "passed"),
        (Shape(1, 64), "passed"),
    ]
    assert str(verification).splitlines()[-1] == "PASSED"


def test_names_the_router_with_wrong_weights(tmp_path: Path) -> None:
    verification = _verify(tmp_path, "weights")
    assert verification.failure is not None
    assert verification.failure.startswith(f"the first router that differs is {SITE}: ")
    assert "weights differ by 5.0e-01 of the largest (allowed 5e-06)" in verification.failure
    assert verification.shapes == ()
    assert "FAILED: the first router that differs is router" in str(verification)


def test_a_cache_of_fixed_length_is_verified_to_its_end(tmp_path: Path) -> None:
    """The other model does not see the slots of the second half, which is told where there are tokens in them."""
    model = decode_model()
    reference = save(model, tmp_path / "reference.onnx")
    positions = next(tensor for tensor in model.graph.initializer if tensor.name == "positions")
    seen = numpy_helper.to_array(positions).copy()
    seen[..., LENGTH // 2 + 1 :] = LENGTH
    positions.CopyFrom(numpy_helper.from_array(seen, "positions"))
    shapes = [(0, "passed"), (LENGTH // 2, "passed"), (LENGTH - 1, "failed")]
    assert [(s.shape.past, s.status) for s in verify(reference, reference).shapes] == [
        (past, "passed") for past, _ in shapes
    ]
    verification = verify(reference, save(model, tmp_path / "other.onnx"))
    assert [(s.shape.past, s.status) for s in verification.shapes] == shapes
    assert f"at {BATCH} x 1 token after {LENGTH - 1}" in str(verification.failure)


UNREAD = """
    scores = Sigmoid (logits)
    keys = Add (scores, bias)
    biased, ids = TopK (keys, k)
    others = GatherElements <axis = 1> (x, ids)
    weights = Abs (others)"""


def test_weights_that_nobody_reads_are_not_compared(tmp_path: Path) -> None:
    """The original's values of that name have the bias, the node's weights have not."""
    build = partial(block, UNREAD, {"bias": np.arange(4, dtype=np.float32)}, experts=4)
    was, model = build(), build()
    rewrite(model)
    (router,) = (node for node in model.graph if node.op_type == "FusedRouter")
    router.outputs[0].name = "biased"
    paths = tmp_path / "reference.onnx", tmp_path / "optimized.onnx"
    for each, path in zip((was, model), paths, strict=True):
        ir.save(each, path)
    verification = verify(*paths)
    assert verification.failure is None
    assert [(site.status, site.difference) for site in verification.sites] == [("passed", 0.0)]


@pytest.mark.parametrize(
    ("attribute", "sentence"),
    [
        ({"k": CHOSEN + 1}, f"it chooses {CHOSEN + 1} experts for a row, the original {CHOSEN}"),
        ({"topk_groups": 2}, "attribute 'topk_groups' must be between 1 and num_groups = 1, but is 2"),
    ],
    ids=["other k", "refused by the kernel"],
)
def test_names_the_router_that_cannot_be_compared(tmp_path: Path, attribute: dict[str, int], sentence: str) -> None:
    model = fused()
    router = next(node for node in model.graph.node if node.op_type == "FusedRouter")
    for name, value in attribute.items():
        next(a for a in router.attribute if a.name == name).i = value
    verification = verify(save(original(), tmp_path / "reference.onnx"), save(model, tmp_path / "optimized.onnx"))
    assert verification.failure is not None
    assert verification.failure.startswith(f"the first router that differs is {SITE}: by our kernel: ")
    assert sentence in verification.failure


@pytest.mark.parametrize("where", ["load", "run"])
def test_other_model_that_fails_is_no_error_of_the_original(
    tmp_path: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = fused()
    last = model.graph.node[-1]
    if where == "load":
        last.op_type, last.domain = "NoSuchOp", "nowhere"
        model.opset_import.append(helper.make_opsetid("nowhere", 1))
    else:
        next(t for t in model.graph.initializer if t.name == "expert_matrices").dims[:] = [
            EXPERTS // 2,
            HIDDEN,
            2 * HIDDEN,
        ]
    verification = verify(save(original(), tmp_path / "reference.onnx"), save(model, tmp_path / "optimized.onnx"))
    assert [shape.status for shape in verification.shapes] == ["failed"] * 3
    assert f"at 1 x 1 token, ONNX Runtime cannot {where} " in str(verification.failure)
    assert capfd.readouterr().err == ""  # told once, by us


def test_text_outputs(tmp_path: Path) -> None:
    paths = []
    for name, model in (("reference", original()), ("optimized", fused()), ("other", fused())):
        text = numpy_helper.from_array(np.array(["a", "bc" if name == "other" else "b"], object), "text")
        model.graph.initializer.append(text)
        model.graph.node.append(helper.make_node("Identity", ["text"], ["words"], "text"))
        model.graph.output.append(helper.make_tensor_value_info("words", TensorProto.STRING, [2]))
        paths.append(save(model, tmp_path / f"{name}.onnx"))
    assert verify(paths[0], paths[1]).passed
    assert "output 'words' differs" in str(verify(paths[0], paths[2]).failure)


def test_finds_wrong_experts_behind_renamed_logits(tmp_path: Path) -> None:
    verification = _verify(tmp_path, "choice")
    assert not verification.passed
    (site,) = verification.sites
    assert (site.status, site.detail) == ("skipped", "its logits 'negated' are not a value of the original")
    assert "no router could be held against the original: of 'router', its logits 'negated' are" in str(
        verification.failure
    )


def test_tells_a_difference_behind_the_routers(tmp_path: Path) -> None:
    verification = _verify(tmp_path, "elsewhere")
    assert "output 'output' differs by 1.0e+00" in str(verification.failure)
    assert "every router agrees, so the difference arises elsewhere" in str(verification.failure)


def test_names_the_router_where_other_logits_lead_elsewhere(tmp_path: Path) -> None:
    """The node is right, but what comes before it is not."""
    reference = save(original(), tmp_path / "reference.onnx")
    other = np.random.default_rng(3).standard_normal((HIDDEN, EXPERTS))
    verification = verify(reference, save(fused(router=other), tmp_path / "optimized.onnx"))
    assert verification.sites[0].status == "passed"
    assert f"the first router that differs is {SITE}: row 0 chooses experts [" in str(verification.failure)


def test_a_flaw_before_the_second_layer_of_a_real_model(tmp_path: Path) -> None:
    from ort_moe.optimization.optimize import optimize

    fixture = models.fixtures.get("mixtral_causal_lm_dynamo_fp32")
    path = tmp_path / "optimized.onnx"
    optimize(fixture.path, path, verify=False)
    model = onnx.load(path)
    routers = [node for node in model.graph.node if node.op_type == "FusedRouter"]
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1.25]), "flaw"))
    flawed = helper.make_node("Mul", [routers[1].input[0], "flaw"], ["flawed_logits"], "flaw")
    position = list(model.graph.node).index(routers[1])
    routers[1].input[0] = "flawed_logits"
    model.graph.node.insert(position, flawed)
    onnx.save(model, path)
    verification = verify(fixture.path, path)
    checked = [(site.what, site.status) for site in verification.sites]
    assert checked == [("router", "passed"), ("router", "skipped"), *[("layer of experts", "passed")] * 2]
    assert "1 of 2 routers could be looked at and agree" in str(verification.failure)


def test_near_tie_is_no_failure_at_the_site(tmp_path: Path) -> None:
    """Two experts with equal logits up to one rounding: either choice is right."""
    reference = np.zeros((HIDDEN, EXPERTS))
    reference[:, :3] = np.random.default_rng(1).standard_normal((HIDDEN, 1))  # always tied, unless all are negative
    tilted = reference.copy()
    tilted[:, 2] *= 1 + 1e-7
    first = save(original(router=reference), tmp_path / "reference.onnx")
    second = save(fused(router=tilted), tmp_path / "optimized.onnx")
    verification = verify(first, second)
    # The site sees the original's logits and agrees; end to end every draw has a tie, so nothing is proved.
    assert verification.sites[0].status == "passed"
    assert all(shape.status != "failed" for shape in verification.shapes)
    prompt = verification.shapes[-1]
    assert (prompt.status, prompt.redraws) == ("skipped", MOST_DRAWS - 1)
    assert prompt.detail.startswith(f"each of {MOST_DRAWS} random inputs had a near tie")


def test_other_bits_in_the_second_run_fail(tmp_path: Path) -> None:
    model = fused()
    model.graph.node[-1].output[0] = "steady"
    model.graph.node.append(helper.make_node("RandomNormalLike", ["steady"], ["noise"], "noise", scale=1e-9))
    model.graph.node.append(helper.make_node("Add", ["steady", "noise"], ["output"], "add"))
    reference = save(original(), tmp_path / "reference.onnx")
    verification = verify(reference, save(model, tmp_path / "optimized.onnx"))
    assert "output 'output' has other bits when the same inputs run again" in str(verification.failure)


def test_fixed_shape_is_run_once(tmp_path: Path) -> None:
    verification = _verify(tmp_path, tokens=4)
    assert verification.passed
    assert len(verification.shapes) == 1


def test_shapes_that_the_original_does_not_take_are_skipped(tmp_path: Path) -> None:
    def limited(model: onnx.ModelProto, name: str) -> Path:
        """For three tokens alone."""
        model.graph.initializer.append(numpy_helper.from_array(np.array([3, HIDDEN], np.int64), "limit"))
        model.graph.node[0].input[0] = "three"
        model.graph.node.insert(0, helper.make_node("Reshape", ["hidden", "limit"], ["three"], "limit"))
        return save(model, tmp_path / name)

    verification = verify(limited(original(), "a.onnx"), limited(fused(), "b.onnx"))
    assert verification.passed
    assert [shape.status for shape in verification.shapes] == ["skipped", "passed", "skipped"]
    assert verification.shapes[0].detail.startswith("the original does not run: ONNX Runtime cannot run ")
    assert verification.summary.endswith(
        "; not compared: 1 x 1 token (the original does not run), 1 x 64 tokens (the original does not run)"
    )
    others = (Shape(1, 1), Shape(1, 2))
    sentence = "nothing could be verified at 1 x 1 token, 1 x 2 tokens: the original does not run: ONNX Runtime cannot"
    with pytest.raises(ModelError, match=sentence):
        verify(tmp_path / "a.onnx", tmp_path / "b.onnx", shapes=others)


@pytest.mark.parametrize("number", [np.nan, np.inf], ids=str)
def test_outputs_that_are_nowhere_finite_prove_nothing(tmp_path: Path, number: float) -> None:
    def spoilt(model: onnx.ModelProto, name: str) -> Path:
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float32), "spoiler"))
        model.graph.node[-1].output[0] = "clean"
        model.graph.node.append(helper.make_node("Max", ["clean", "spoiler"], ["output"], "spoil"))
        return save(model, tmp_path / name)

    verification = verify(spoilt(original(), "a.onnx"), spoilt(fused(wrong="elsewhere"), "b.onnx"))
    assert [shape.status for shape in verification.shapes] == ["skipped"] * 3
    assert "no shape could be compared end to end: the original's outputs are NaN or infinite throughout" in str(
        verification.failure
    )


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    def narrowed(model: onnx.ModelProto, data: str) -> Path:
        """Weights in bfloat16 in an external file, cast up where they are used."""
        for tensor in model.graph.initializer:
            if tensor.name in ("router_matrix", "expert_matrices"):
                array = numpy_helper.to_array(tensor)
                tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.BFLOAT16, array.shape, array.ravel()))
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.elem_type = TensorProto.BFLOAT16
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.BFLOAT16
        return save(model, tmp_path / f"{data}.onnx", data=f"{data}.bin")

    verification = verify(narrowed(original(), "reference"), narrowed(fused(), "optimized"))
    assert verification.passed
    assert verification.sites[0].status == "passed"
    assert any("bfloat16 widened" in note for note in verification.notes)
    assert verification.summary.endswith("; bfloat16 widened to float32, which the CPU can run")


def test_model_without_fused_nodes(tmp_path: Path) -> None:
    path = save(original(), tmp_path / "model.onnx")
    verification = verify(path, path)
    assert verification.passed
    assert verification.sites == ()
    other = np.random.default_rng(3).standard_normal((HIDDEN, EXPERTS))
    verification = verify(path, save(original(router=other), tmp_path / "other.onnx"))
    assert "there is no fused router to look at" in str(verification.failure)


def test_refuses_models_of_other_outputs(tmp_path: Path) -> None:
    model = fused()
    model.graph.output[0].name = "weights"
    sentence = "the original alone has the outputs 'output', the other alone has the outputs 'weights'"
    with pytest.raises(ModelError, match=sentence):
        verify(save(original(), tmp_path / "a.onnx"), save(model, tmp_path / "b.onnx"))


@pytest.mark.parametrize(
    ("changes", "other"), [({"dtype": np.float16}, r"FLOAT16\[tokens,8\]"), ({"tokens": 5}, r"FLOAT\[5,8\]")]
)
def test_refuses_models_of_other_types_and_sizes(tmp_path: Path, changes: dict[str, Any], other: str) -> None:
    reference = save(original(tokens=4 if "tokens" in changes else "tokens"), tmp_path / "reference.onnx")
    optimized = save(fused(**changes), tmp_path / "optimized.onnx")
    with pytest.raises(ModelError, match=f"cannot be compared: 'hidden' is .* in the original, {other} in the other"):
        verify(reference, optimized)


@pytest.mark.parametrize(
    ("alone", "order", "sentence"),
    [
        (("more",), "reference", "the original alone has the outputs 'more'"),
        (("more",), "optimized", "the other alone has the outputs 'more'"),
        (("more", "most"), "both", "their outputs are in another order"),
    ],
    ids=["reference", "optimized", "order"],
)
def test_models_with_other_outputs(tmp_path: Path, alone: tuple[str, ...], order: str, sentence: str) -> None:
    reference, optimized = original(), fused()
    for model, where in ((reference, "reference"), (optimized, "optimized")):
        for name in alone if order in (where, "both") else ():
            model.graph.node.append(helper.make_node("Identity", ["output"], [name], name))
            model.graph.output.insert(len(model.graph.output) if where == "reference" else 0, _output(name))
    with pytest.raises(ModelError, match=f"the models cannot be compared: {sentence}"):
        verify(save(reference, tmp_path / "reference.onnx"), save(optimized, tmp_path / "optimized.onnx"))


def _output(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", HIDDEN])


def test_says_what_cannot_be_loaded(tmp_path: Path) -> None:
    model = original()
    model.graph.node[0].op_type = "NoSuchOperator"
    path = save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"ONNX Runtime cannot load .*model\.onnx: .*NoSuchOperator"):
        verify(path, path)


def test_needs_a_runtime(tmp_path: Path, no_onnxruntime: None) -> None:
    path = save(original(), tmp_path / "model.onnx")
    with pytest.raises(EnvironmentUnfitError, match="no ONNX Runtime is installed"):
        verify(path, path)


def test_without_the_library_function_bodies_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ort_moe.verification.comparison.library_is_there", lambda: False)
    verification = _verify(tmp_path)
    assert verification.passed
    assert any("our library is not there" in note for note in verification.notes)
    assert not _verify(tmp_path, "weights").passed


def test_nodes_without_function_bodies_are_verified_by_our_kernels(tmp_path: Path) -> None:
    """Experts of ours behind a router of standard operators: without our library neither model runs."""
    attributes = FUSED_EXPERTS.complete({"activation": "relu", "gated": 0})
    experts = helper.make_node(
        "FusedExperts",
        ["x", "weights", "ids_int32", "", "", "", "", "fc1", "", "", "", "", "fc2"],
        ["y"],
        domain=DOMAIN,
        **attributes,
    )
    rng = np.random.default_rng(0)
    was = block(
        """
        scores = Softmax (logits)
        weights, ids = TopK (scores, k)
        ids_int32 = Cast <to = 6> (ids)""",
        experts_text="y = Identity (x)",
    )
    proto = ir.to_proto(was)
    proto.graph.node[-1].CopyFrom(experts)
    proto.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    for name, shape in (("fc1", (8, 3, 4)), ("fc2", (8, 4, 3))):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    reference = save(proto, tmp_path / "reference.onnx")
    model = ir.load(reference)
    assert [site.status for site in rewrite(model).sites] == ["whole"]
    for key in [key for key, function in model.functions.items() if function.name == "FusedExperts"]:
        del model.functions[key]
    ir.save(model, tmp_path / "optimized.onnx")
    verification = verify(reference, tmp_path / "optimized.onnx")
    assert verification.failure is None
    assert [site.status for site in verification.sites] == ["passed", "passed"]
    assert "our nodes by our kernels, for not all have function bodies" in verification.notes


def test_models_without_a_node_of_ours() -> None:
    path = models.fixtures.get("qwen3_moe_block_dynamo_fp32").path
    verification = verify(path, path)
    assert verification.failure is None
    assert "there is no node of ours in it" in verification.notes
    assert not any("our nodes" in note for note in verification.notes)


def test_document_is_json(tmp_path: Path) -> None:
    document = _verify(tmp_path, "choice").to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["passed"] is False
