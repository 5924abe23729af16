"""The committed fixtures are what their index says, run, and are worth testing with."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import models.fixtures
from models.architectures import ARCHITECTURES, HIDDEN_SIZE, VOCAB_SIZE, architecture
from models.fixtures import Fixture
from models.targets import targets

SIZE_LIMIT = 3_000_000  # bytes, all fixtures together: they are cloned by everyone
FIXTURES = models.fixtures.all()

every_fixture = pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.name)


def run(fixture: Fixture, batch: int, tokens: int) -> np.ndarray:
    session = onnxruntime.InferenceSession(fixture.path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, fixture.sample_inputs(0, batch, tokens))
    return output


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
    assert {fixture.name for fixture in FIXTURES} <= {target.name for target in targets()}


def test_docs_list_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        f"| {row.name} | {row.experts} | {row.k} | {', '.join(row.kinds)} | {row.router} |" for row in ARCHITECTURES
    ]


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
    # Every block multiplies by two stacks of expert matrices: into the inner size and back.
    stacks = [
        value.const_value
        for value in graph.initializers.values()
        if value.shape is not None and value.shape.rank() == 3 and value.shape[0] == row.experts
    ]
    assert len(stacks) == 2 * fixture.layers
    expected = ir.DataType.FLOAT if fixture.precision == "fp32" else ir.DataType.FLOAT16
    assert {stack.dtype for stack in stacks if stack is not None} == {expected}
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
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 4)])
def test_runs_at_any_batch_and_length(fixture: Fixture, batch: int, tokens: int) -> None:
    output = run(fixture, batch, tokens)
    assert output.shape == (batch, tokens, HIDDEN_SIZE if fixture.kind == "block" else VOCAB_SIZE)
    assert output.dtype == (np.float32 if fixture.precision == "fp32" else np.float16)
    assert np.isfinite(output).all()
    assert output.std() > 0.01


@pytest.mark.parametrize(
    "fixture",
    [f for f in FIXTURES if f.kind == "block" and f.precision == "fp32" and f.architecture != "phimoe"],
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

    assert set(np.unique(ids)) == set(range(fixture.experts))
    ranked = -np.sort(-keys, axis=-1)
    gap = ranked[:, fixture.k - 1] - ranked[:, fixture.k]
    assert (gap < 1e-5).mean() < 0.01
