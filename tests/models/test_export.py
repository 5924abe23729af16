"""Fresh exports equal the committed fixtures: in structure, in what they compute, and in how they are fused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
from models.architectures import ARCHITECTURES, architecture
from models.fixtures import Fixture
from models.plan import EXPORTERS, PRECISIONS, VARIANTS
from ort_moe.verification.runnable_model import RunnableModel

pytestmark = pytest.mark.export

SAMPLED = (
    # Of each family, every exporter and every precision once.
    *("dynamo_bf16", "legacy_fp16", "transformers_fp32", "transformers_grouped_fp32"),
    # Of one architecture, every variant.
    *(variant for variant in VARIANTS if variant),
)


def sample() -> Iterator[Fixture]:
    """What is exported afresh: all of them would take a quarter of an hour."""
    by_family: dict[tuple[str, str], Fixture] = {}
    for fixture in models.fixtures.all():
        family = "" if fixture.variant else architecture(fixture.architecture).family
        for part in SAMPLED:
            if fixture.name.endswith(f"_{part}"):
                by_family.setdefault((family, part), fixture)
    yield from {fixture.name: fixture for fixture in by_family.values()}.values()
    for exporter in ("dynamo", "legacy", "transformers"):
        yield models.fixtures.get(f"mixtral_causal_lm_{exporter}_fp32")


EXPORTED = list(sample())


@pytest.fixture(scope="module", params=EXPORTED, ids=lambda fixture: fixture.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Fixture, Fixture]:
    """A committed fixture and the same exported afresh."""
    from models.export import export, targets

    committed: Fixture = request.param
    (target,) = [target for target in targets() if target.name == committed.name]
    return committed, export(target, tmp_path_factory.mktemp("fresh"))


def structure(path: Path) -> list[object]:
    """Describe a graph without its names: nodes in order with attributes; inputs by where they come from."""
    graph = ir.load(path).graph
    numbers: dict[ir.Value | None, object] = {None: None}
    for i, value in enumerate(graph.inputs):
        numbers[value] = ("input", i, str(value.dtype), str(value.shape))
    for value in graph.initializers.values():
        numbers[value] = ("constant", str(value.dtype), str(value.shape))
    described: list[object] = []
    for i, node in enumerate(graph):
        attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
        described.append((node.domain, node.op_type, attributes, [numbers[value] for value in node.inputs]))
        numbers |= {value: ("node", i, j) for j, value in enumerate(node.outputs)}
    described.append([numbers[value] for value in graph.outputs])
    return described


def run(fixture: Fixture, seed: int) -> dict[str, np.ndarray]:
    with RunnableModel(fixture.path) as model:
        feeds = fixture.sample_inputs(seed, 2, 9)
        if model.widened and fixture.kind == "block":
            feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
        return model.session(with_library=False)(feeds)


def test_sample_has_every_exporter_precision_and_variant() -> None:
    for family in {row.family for row in ARCHITECTURES}:
        of_family = [fixture for fixture in EXPORTED if architecture(fixture.architecture).family == family]
        assert {fixture.exporter for fixture in of_family} >= {"dynamo", "legacy", "transformers"}
        assert {fixture.precision for fixture in of_family} == set(PRECISIONS)
    assert {fixture.variant for fixture in EXPORTED} == set(VARIANTS)
    assert {fixture.exporter for fixture in EXPORTED} == set(EXPORTERS)


def test_installed_versions_are_the_fixtures() -> None:
    """Everything below compares like with like only where this holds."""
    import torch
    import transformers

    installed = (torch.__version__.split("+")[0], transformers.__version__)
    assert {(fixture.torch, fixture.transformers) for fixture in models.fixtures.all()} == {installed}


def test_same_index_row(pair: tuple[Fixture, Fixture]) -> None:
    from models.export import index_row

    committed, fresh = pair
    assert index_row(fresh) == index_row(committed)


def test_same_structure(pair: tuple[Fixture, Fixture]) -> None:
    committed, fresh = pair
    assert structure(fresh.path) == structure(committed.path)


def test_same_outputs(pair: tuple[Fixture, Fixture]) -> None:
    committed, fresh = pair
    # Constants that torch folds with exp or pow may differ in the last place between machines.
    tolerance = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 1e-3}[committed.precision]
    for seed in range(2):
        expected, got = run(committed, seed), run(fresh, seed)
        assert list(got) == list(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance * np.abs(value).max())


def test_fuses_the_same(pair: tuple[Fixture, Fixture]) -> None:
    from ort_moe.rewrites import rewrite

    fused = []
    for fixture in pair:
        model = ir.load(fixture.path)
        sites = [(site.status, site.experts, site.k, site.attributes) for site in rewrite(model).sites]
        fused.append((sites, [(node.domain, node.op_type) for node in model.graph]))
    assert fused[1] == fused[0]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_export_is_deterministic(tmp_path: Path, exporter: str) -> None:
    from models.export import main

    name = f"mixtral_block_{exporter}_fp16"
    for folder in ("first", "second"):
        assert main(["--only", name, "--out", str(tmp_path / folder)]) == 0
    first, second = (sorted((tmp_path / folder).iterdir()) for folder in ("first", "second"))
    assert [path.name for path in first] == ["index.json", f"{name}.onnx"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_index_keeps_the_other_rows(tmp_path: Path) -> None:
    from models.export import write_index

    index_path = tmp_path / "index.json"
    first, second, *_ = models.fixtures.all()
    write_index([second], index_path)
    write_index([first], index_path)
    assert [fixture.name for fixture in models.fixtures.load_index(index_path)] == [first.name, second.name]


def test_wrong_export_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import models.export

    monkeypatch.setitem(models.export.TOLERANCES, "fp32", -1.0)
    assert models.export.main(["--only", "mixtral_block_dynamo_fp32", "--out", str(tmp_path)]) == 1
    assert "mixtral_block_dynamo_fp32: ONNX Runtime differs from torch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from models.export import main

    with pytest.raises(SystemExit) as refused:
        main(["--only", "mixtrall", "--out", str(tmp_path / "out")])
    assert refused.value.code == 2
    assert "--only mixtrall: no such fixture or architecture" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
