"""Running `ort-moe` in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ort_moe.cli import main
from tests.ort_moe.tiny_models import original, save


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        code: Its exit code.
        out: What it printed on stdout.
        err: What it printed on stderr.
    """

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def ort_moe(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs `ort-moe` with the arguments given."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in arguments])
        code = exited.value.code
        return Outcome(0 if code is None else int(code), *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with one router."""
    return save(original(), tmp_path / "model.onnx")


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A model with a TopK that is no router."""
    from onnx import TensorProto, helper

    model = original()
    del model.graph.node[3:]
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("ids", TensorProto.INT64, None))
    return save(model, tmp_path / "classifier.onnx")
