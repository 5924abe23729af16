"""The committed fixtures are what their index says, run, and are worth testing with."""

import math
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import models.fixtures
from models.architectures import ARCHITECTURES, architecture
from models.fixtures import STATIC_SHAPE, Fixture
from models.geometry import HIDDEN_SIZE, VOCAB_SIZE
from models.plan import EXPORTERS, PRECISIONS, VARIANTS
from models.targets import targets
from ort_moe.verification.runnable_model import RunnableModel

SIZE_LIMIT = 8_000_000  # bytes, all fixtures together: they are cloned by everyone
FIXTURES = models.fixtures.all()

every_fixture = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for subgraph in [attribute.g, *attribute.graphs]:
                yield from all_nodes(subgraph)


def test_index_matches_the_files() -> None:
    files = {path.name for path in models.fixtures.INDEX_PATH.parent.glob("*.onnx")}
    assert files == {fixture.path.name for fixture in FIXTURES}
    assert [fixture.name for fixture in FIXTURES] == sorted(fixture.name for fixture in FIXTURES)


def test_fixtures_cover_the_table() -> None:
    assert [fixture.name for fixture in FIXTURES] == [target.name for target in targets()]


@pytest.mark.parametrize("family", sorted({row.family for row in ARCHITECTURES}))
def test_every_family_has_every_exporter_and_precision(family: str) -> None:
    fixtures = [fixture for fixture in FIXTURES if architecture(fixture.architecture).family == family]
    # Llama 4 runs all experts: it has no grouped_mm.
    assert {fixture.exporter for fixture in fixtures} == set(EXPORTERS) - (
        {EXPORTERS[-1]} if family == "scatter" else set()
    )
    assert {fixture.precision for fixture in fixtures} == set(PRECISIONS)


def test_every_architecture_has_the_common_exports() -> None:
    for exporter in ("dynamo", "legacy", "transformers"):
        exported = {f.architecture for f in FIXTURES if (f.exporter, f.precision) == (exporter, "fp32")}
        assert exported == {row.name for row in ARCHITECTURES if (exporter, row.name) != ("transformers", "aria_text")}
    assert len({fixture.architecture for fixture in FIXTURES if fixture.kind == "causal_lm"}) >= 6


def test_fixtures_are_small() -> None:
    assert sum(fixture.path.stat().st_size for fixture in FIXTURES) < SIZE_LIMIT


def test_get() -> None:
    fixture = models.fixtures.get("mixtral_block_dynamo_fp32")
    assert (fixture.architecture, fixture.kind, fixture.precision) == ("mixtral", "block", "fp32")
    with pytest.raises(ValueError, match=r"no fixture 'mixtrall'; there are .*mixtral_block_dynamo_fp32"):
        models.fixtures.get("mixtrall")
    with pytest.raises(ValueError, match=r"no architecture 'mixtrall'; there are .*mixtral"):
        architecture("mixtrall")


def test_listing_needs_no_heavy_import() -> None:
    code = (
        "import sys, models.fixtures; models.fixtures.all();"
        "print({'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_sample_inputs_are_seeded() -> None:
    fixture = models.fixtures.get("mixtral_block_dynamo_fp16")
    first, same, other = (fixture.sample_inputs(seed, 4, 5)["hidden_states"] for seed in (1, 1, 2))
    assert first.dtype == np.float16
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


@every_fixture
def test_index_tells_the_truth(fixture: Fixture) -> None:
    row = architecture(fixture.architecture)
    (target,) = [target for target in targets() if target.name == fixture.name]
    assert (target.architecture, target.kind, target.exporter) == (row, fixture.kind, fixture.exporter)
    assert (target.precision, target.variant, target.opset) == (fixture.precision, fixture.variant, fixture.opset)
    assert (fixture.experts, fixture.k) == (row.experts, row.k)

    graph = ir.load(fixture.path).graph
    assert graph.opset_imports == {"": fixture.opset}
    variant = VARIANTS[fixture.variant]
    assert len(graph.outputs) == 1 + variant.router_logits * fixture.layers
    leading = STATIC_SHAPE if variant.static else (None, None)
    for value in (graph.inputs[0], graph.outputs[0]):
        assert value.shape is not None
        assert tuple(size if isinstance(size, int) else None for size in value.shape[:2]) == leading

    # Every block multiplies by two stacks of expert matrices: into the inner size and back.
    experts = row.experts - (row.family == "skipped experts")
    stacks = [
        value.const_value
        for value in graph.initializers.values()
        if value.shape is not None and value.shape.rank() == 3 and value.shape[0] == experts
    ]
    assert len(stacks) == 2 * fixture.layers
    expected = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
    assert {stack.dtype for stack in stacks if stack is not None} == {expected[fixture.precision]}
    if row.name != "phimoe":  # it has ArgMax instead
        ks = [constant(node.inputs[1]) for node in graph if node.op_type == "TopK"]
        assert ks.count(row.k) >= fixture.layers


def constant(value: ir.Value | None) -> object:
    """The number that `value` is: an initializer, or a Constant node, which the legacy exporter writes."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy().item()


@every_fixture
def test_stripped(fixture: Fixture) -> None:
    model = onnx.load(fixture.path)
    graph = model.graph
    assert not model.functions
    holders = [model, graph, *all_nodes(graph), *graph.initializer, *graph.input, *graph.output, *graph.value_info]
    assert not any(holder.doc_string or holder.metadata_props for holder in holders)


@every_fixture
def test_runs_at_any_batch_and_length(fixture: Fixture) -> None:
    with RunnableModel(fixture.path) as model:
        assert model.widened == (fixture.precision == "bf16")
        run = model.session(with_library=False)
        for shape in [STATIC_SHAPE] if fixture.static else [(1, 1), (3, 4)]:
            feeds = fixture.sample_inputs(0, *shape)
            if model.widened and fixture.kind == "block":
                feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
            output, *router_logits = run(feeds).values()
            assert output.shape == (*shape, HIDDEN_SIZE if fixture.kind == "block" else VOCAB_SIZE)
            assert output.dtype == (np.float16 if fixture.precision == "fp16" else np.float32)
            assert {logits.shape for logits in router_logits} <= {(math.prod(shape), fixture.experts)}
            for value in (output, *router_logits):
                assert np.isfinite(value).all()
                assert value.std() > 0.01


@pytest.mark.parametrize(
    "fixture",
    # It is a matter of the weights, so one export does; phimoe has ArgMax instead.
    [f for f in FIXTURES if f.name.endswith("_block_dynamo_fp32") and f.architecture != "phimoe"],
    ids=lambda fixture: fixture.name,
)
def test_routing_is_worth_testing(fixture: Fixture) -> None:
    """Every expert is chosen, and the last expert chosen is seldom nearly equal to the first one left out."""
    model = onnx.load(fixture.path)
    final_top_k = [node for node in model.graph.node if node.op_type == "TopK"][-1]
    keys_name, ids_name = final_top_k.input[0], final_top_k.output[1]
    model.graph.output.append(onnx.helper.make_tensor_value_info(keys_name, onnx.TensorProto.FLOAT, None))
    model.graph.output.append(onnx.helper.make_tensor_value_info(ids_name, onnx.TensorProto.INT64, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    keys, ids = session.run([keys_name, ids_name], fixture.sample_inputs(0, 8, 32))

    left_out = set(range(fixture.experts)) - set(np.unique(ids))
    assert left_out <= ({2} if fixture.architecture == "zaya" else set())  # it has 1 of 9 chosen
    ranked = -np.sort(-keys, axis=-1)
    gap = ranked[..., fixture.k - 1] - ranked[..., fixture.k]
    assert (gap < 1e-5).mean() < 0.01
