"""optimize --weights: packed while rewriting, told of, verified against what was meant, and never half-written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import models.fixtures
import ort_moe
from ort_moe.errors import ModelError, OutputError
from ort_moe.files.loading import data_files, load_model
from ort_moe.files.weights_file import WeightsFile
from ort_moe.optimization.optimize import optimize
from ort_moe.verification.tolerance import TOLERANCES
from tests.contrib_models import ContribCase
from tests.ort_moe.large_models import LargeModel
from tests.ort_moe.published_schemas import check

SMALL = LargeModel(layers=2, experts=4, k=2, hidden=64, inner=64)
"""Fit for every format; the second layer's weights are turned."""

OPTIONS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "mxfp4": {},
    "fp8": {"block_size": 32},
    "int8": {"block_size": 64},
    "int4": {"block_size": 16, "zero_points": True},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return SMALL.write(folder / "model.onnx")


def test_weights_behind_a_link(source: Path, tmp_path: Path) -> None:
    """As in Hugging Face's cache."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for path in data_files(load_model(source)).values():
        path.symlink_to(path.rename(cache / path.name))
    with pytest.raises(ModelError, match=r"is a link to another folder, .* with `cp -L`"):
        optimize(source, tmp_path / "out.onnx", weights="nvfp4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "in"]


@pytest.mark.parametrize("weights", OPTIONS)
def test_packed_and_verified(source: Path, tmp_path: Path, weights: str) -> None:
    output = tmp_path / "out.onnx"
    report = optimize(source, output, weights=weights, **OPTIONS[weights])
    assert [len(each.layers) for each in report.conversions] == [2, 2]
    assert {each.attributes["weight_format"] for each in report.experts if each.attributes} == {weights}
    assert report.verification is not None
    assert report.verification.measure == "norm"
    assert [site.change is not None for site in report.verification.sites] == [False, False, True, True]
    assert 0 < max(shape.difference for shape in report.verification.shapes) < report.verification.tolerance
    check("report", report.to_dict())
    told = " ".join(str(report).split())
    assert f"weights of 2 layers of experts packed to {report.conversions[0].packing}: 192.0 KiB to" in told
    assert "of their norm at most" in told
    assert "of the norm (allowed" in told
    assert "error of the norm" in str(report.in_full)
    assert data_files(load_model(output)) == {"out.onnx.data": tmp_path / "out.onnx.data"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.onnx", "out.onnx.data"]
    (y,) = ort_moe.session(output).run(None, {"x": np.ones((3, SMALL.hidden), np.float16)})
    assert np.isfinite(y).all()


def test_one_file_for_all(source: Path) -> None:
    output = source.with_name("out.onnx")
    optimize(source, output, weights="nvfp4", external_data="all.bin")
    assert set(data_files(load_model(output))) == {"all.bin"}
    assert sorted(path.name for path in source.parent.iterdir()) == ["all.bin", "model.onnx", "out.onnx", "weights.bin"]


def test_model_in_one_file(tmp_path: Path) -> None:
    fixture, output = models.fixtures.get("mixtral_block_dynamo_fp32"), tmp_path / "out.onnx"
    report = optimize(fixture.path, output, weights="fp8")
    assert report.verification is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]
    assert not data_files(load_model(output))


def test_bfloat16(tmp_path: Path) -> None:
    """Verified in float32, which the CPU can run; the body's graphs, too."""
    fixture, output = models.fixtures.get("gpt_oss_block_dynamo_bf16"), tmp_path / "out.onnx"
    report = optimize(fixture.path, output, weights="fp8", block_size=16)
    assert report.verification is not None
    assert "our nodes by our kernels and by their function bodies" in report.verification.notes
    assert all(each.layers for each in report.conversions)


def test_dry_run_tells_the_error(source: Path) -> None:
    report = optimize(source, weights="nvfp4")
    assert all(layer.relative_error > 0.05 for each in report.conversions for layer in each.layers)
    assert sorted(path.name for path in source.parent.iterdir()) == ["model.onnx", "weights.bin"]


def test_already_optimised(source: Path) -> None:
    dense, packed, again = (source.with_name(f"{name}.onnx") for name in ("dense", "packed", "again"))
    optimize(source, dense)
    report = optimize(dense, packed, weights="int8", block_size=64)
    assert report.matched
    assert re.search(r"^nodes: (\d+) before, \1 after$", str(report), re.MULTILINE)
    assert len(report.conversions) == 2
    again_verified = ort_moe.verify(packed, packed)
    assert (again_verified.measure, again_verified.tolerance) == ("largest", TOLERANCES["float16"].outputs)
    assert all(site.change is None for site in again_verified.sites)
    report = optimize(packed, again, weights="nvfp4")
    assert not report.matched
    assert "weights not packed: they are packed already, in int8" in " ".join(str(report).split())


def test_experts_that_stay_a_contrib_node(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(ContribCase(weight_format="fp8", dtype="float16").model(), path)
    report = optimize(path, output, weights="nvfp4")
    assert report.warnings == ("no weights packed to nvfp4: there is no FusedExperts",)
    assert optimize(path, output, force=True).warnings == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": "int5"},
            "the format of weights 'int5' is unknown; there are keep, nvfp4, mxfp4, int4, int8",
        ),
        ({"block_size": 32}, "block sizes and zero points are for weights that are packed, but they are kept"),
        ({"weights": "nvfp4", "zero_points": True}, "nvfp4 has no zero points"),
        ({"weights": "nvfp4", "target": "contrib"}, "contrib nodes keep those that they have"),
    ],
)
def test_what_there_is_not(source: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize(source, **options)


def test_disk_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WeightsFile, "write", full)
    with pytest.raises(OutputError, match=r"cannot write .*out\.onnx: No space left on device"):
        optimize(source, tmp_path / "out.onnx", weights="nvfp4")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_codes_that_mean_something_else(source: Path, tmp_path: Path) -> None:
    """Nibbles the other way round: every node runs, and none computes what the original does."""
    output = tmp_path / "out.onnx"
    optimize(source, output, weights="nvfp4")
    proto = onnx.load(output, load_external_data=False)
    weights = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith("fc1_nvfp4_weights"))
    offset, length = (int(entry.value) for entry in weights.external_data if entry.key in ("offset", "length"))
    with (tmp_path / "out.onnx.data").open("r+b") as file:
        file.seek(offset)
        codes = np.frombuffer(file.read(length), np.uint8)
        file.seek(offset)
        file.write((codes << 4 | codes >> 4).tobytes())
    verification = ort_moe.verify(source, output)
    check("verify", json.loads(json.dumps(verification.to_dict())))
    assert verification.failure is not None
    told = r"its weights were packed, which changes its rows by \d\.\de\+00 of their norm \(allowed 0\.7\)"
    assert re.search(told, verification.failure)


def test_outputs_of_zeros(source: Path, tmp_path: Path) -> None:
    """Whatever may be lost to packing: nothing is not what the original returns."""
    output = tmp_path / "out.onnx"
    optimize(source, output, weights="nvfp4")
    proto = onnx.load(output, load_external_data=False)
    for node in proto.graph.node:
        node.output[:] = ["all" if name == "y" else name for name in node.output]
    proto.graph.node.append(onnx.helper.make_node("Sub", ["all", "all"], ["y"]))
    onnx.save(proto, output)
    failure = ort_moe.verify(source, output).failure
    assert failure is not None
    assert "output 'y' differs by inf of its norm" in failure
