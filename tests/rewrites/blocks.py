"""Small MoE blocks around a router in ONNX's text form, and what the tests ask of them.

x (T, H) -> logits = x @ gate -> ROUTER -> one matrix per chosen expert -> weighted sum y (T, H)

ROUTER reads `logits` (T, E) and writes `weights` (T, K), in x's type, and `ids` (T, K) int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import numpy_helper

from ort_moe.installation import library
from ort_moe.rewrites import RewriteResult, Site, rewrite

HIDDEN, EXPERTS, K, TOKENS = 4, 8, 2, 33

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: Mapping[str, Any] = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

EXPERTS_TEXT = """
    rows = Unsqueeze (ids, minus1)
    chosen = GatherND (experts, rows)
    x4 = Unsqueeze (x, one_two)
    products = MatMul (x4, chosen)
    outputs = Squeeze (products, two)
    column = Unsqueeze (weights, minus1)
    weighted = Mul (outputs, column)
    y = ReduceSum <keepdims = 0> (weighted, one)
"""

STANDARD_CONSTANTS: Mapping[str, Array] = {
    "minus1": np.array([-1], np.int64),
    "one": np.array([1], np.int64),
    "two": np.array([2], np.int64),
    "one_two": np.array([1, 2], np.int64),
    "k": np.array([K], np.int64),
}


def block(
    router: str,
    constants: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float",
    experts_text: str = EXPERTS_TEXT,
    outputs: str = "",
    experts: int = EXPERTS,
    opset: int = 20,
    imports: Mapping[str, int] | None = None,
    seed: int = 0,
) -> ir.Model:
    """A model of one block.

    Args:
        router: Its nodes, one a line.
        constants: Further initializers; Python floats become scalars of `dtype`.
        dtype: Of x, the gate and the expert matrices.
        experts_text: The nodes after the router.
        outputs: Further graph outputs, as in `, float[T, 2] weights`.
        experts: E.
        opset: Version of the standard operator set.
        imports: Further domains, with their versions.
        seed: Of the random weights.
    """
    rng = np.random.default_rng(seed)
    # Multiples of 1/8 make equal logits for equal columns exact in every type.
    gate = rng.integers(-8, 9, (HIDDEN, experts)) / 8
    initializers = {
        **STANDARD_CONSTANTS,
        "gate": gate.astype(DTYPES[dtype]),
        "experts": rng.standard_normal((experts, HIDDEN, HIDDEN)).astype(DTYPES[dtype]),
        **{
            name: np.array(value, DTYPES[dtype]) if isinstance(value, float) else np.asarray(value)
            for name, value in (constants or {}).items()
        },
    }
    domains = ", ".join(f'"{domain}" : {version}' for domain, version in {"": opset, **(imports or {})}.items())
    text = f"""
        <ir_version: 10, opset_import: [{domains}]>
        block ({dtype}[T, {HIDDEN}] x) => ({dtype}[T, {HIDDEN}] y{outputs}) {{
            logits = MatMul (x, gate)
            {router}
            {experts_text}
        }}"""
    proto = onnx.parser.parse_model(text)
    used = _names_read(proto.graph)
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in initializers.items() if name in used
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type.lower()}_{number}"
    return ir.from_proto(proto)


def _names_read(graph: onnx.GraphProto) -> set[str]:
    """What nodes read, in the bodies of control flow, too."""
    bodies = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return {name for node in graph.node for name in node.input}.union(*map(_names_read, bodies))


def fused(model: ir.Model, **options: Any) -> tuple[Site, RewriteResult]:
    """Rewrite a block with one router and return its site."""
    result = rewrite(model, **options)
    sites = [site for site in result.sites if site.experts is not None]
    assert len(sites) == 1, result.sites
    return sites[0], result


def assert_fuses(
    build: Any,
    expected: Mapping[str, Any],
    *,
    absorbed: tuple[str, ...],
    rtol: float = 1e-5,
) -> None:
    """The block becomes one whole FusedRouter with these attributes, and computes what it did.

    Args:
        build: Makes the block afresh.
        expected: Attributes that must be so; a dictionary without `k`.
        absorbed: Names of the rules, in any order.
        rtol: Of weights and y, relative to their maximum.
    """
    original, model = build(), build()
    site, result = fused(model)
    assert site.status == "whole", site.findings
    assert site.attributes is not None
    assert site.node in [node.name for node in original.graph if node.op_type in ("TopK", "ArgMax", "Concat")]
    assert {name: site.attributes[name] for name in expected} == dict(expected)
    assert set(site.absorbed) == set(absorbed), site.absorbed
    assert result.modified
    assert_same(original, model, rtol=rtol)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not rewrite(model).modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def assert_stays(build: Any, *, status: str, sentence: str, reason: str | None = None, rtol: float = 1e-5) -> Site:
    """The block is not whole, a finding says the sentence (under that reason), and it computes what it did."""
    original, model = build(), build()
    site, _ = fused(model)
    assert site.status == status
    told = [(finding.reason.slug, finding.detail) for finding in site.findings]
    assert any(sentence in detail and reason in (None, slug) for slug, detail in told), told
    assert_same(original, model, rtol=rtol)
    return site


def assert_same(original: ir.Model, rewritten: ir.Model, *, rtol: float = 1e-5, seed: int = 1) -> None:
    """Same weights, ids and y in plain ONNX Runtime (the function body) and with the library (the kernel)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, HIDDEN))
    reference = run(original, x, with_library=False)
    for with_library in (False, True):
        outputs = run(rewritten, x, with_library=with_library)
        order = np.argsort(reference["ids"], axis=-1)
        other = np.argsort(outputs["ids"], axis=-1)
        for name in ("ids", "weights"):
            was = np.take_along_axis(reference[name], order, -1)
            now = np.take_along_axis(outputs[name], other, -1)
            assert was.dtype == now.dtype
            _assert_close(was, now, 0.0 if name == "ids" else rtol, name)
        _assert_close(reference["y"], outputs["y"], rtol, "y")


def _assert_close(was: Array, now: Array, rtol: float, name: str) -> None:
    wide_was, wide_now = was.astype(np.float64), now.astype(np.float64)
    assert np.isfinite(wide_was).all(), name
    np.testing.assert_allclose(wide_now, wide_was, rtol=0, atol=rtol * np.abs(wide_was).max(), err_msg=name)


def cpu_session(model: ir.Model | onnx.ModelProto, *, with_library: bool) -> Any:
    """A session in plain ONNX Runtime, or one in which our library is registered."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if with_library:
        library.register(options)
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


def run(model: ir.Model, x: Array, *, with_library: bool) -> dict[str, Array]:
    """Run a block and return y, weights and ids by name: the names survive the rewrite."""
    proto = ir.to_proto(model)
    present = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("weights", "ids") if name not in present)
    session = cpu_session(proto, with_library=with_library)
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[session.get_inputs()[0].type]
    names = ["y", "weights", "ids"]
    return dict(zip(names, session.run(names, {"x": x.astype(dtype)}), strict=True))
