"""What is measured beside ours: how peers are found, and that PyTorch's ops do the same work."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ort_moe.reference.aux_loss import aux_loss, aux_loss_grad
from ort_moe.reference.fused_router import fused_router
from ort_moe.reference.router_probs import router_probs, router_probs_grad
from ort_moe.reference.router_scores import router_scores, router_scores_grad

pytestmark = pytest.mark.export  # needs PyTorch
torch = pytest.importorskip("torch")

GROUPED = {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5, "num_groups": 4, "topk_groups": 2}
GROUPED |= {"group_score_top": 2, "group_fill": 0.0}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, whose modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "sglang":
            del sys.modules[name]


def install(site: Path, name: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (site / f"{name}-1.2.dist-info").mkdir()
    (site / f"{name}-1.2.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")


def test_only_what_is_installed_is_found(site: Path) -> None:
    from benchmarks import peers

    assert peers.installed("nobodys-kernels", "a.so") is None
    install(site, "nobodys_kernels", {"nobodys/a.so": ""})
    assert peers.installed("nobodys-kernels", "nobodys/a.so") == (site / "nobodys/a.so", "1.2")
    assert peers.installed("nobodys-kernels", "nobodys/b.so") is None


def test_a_kernel_is_loaded_without_the_package_around_it(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import peers

    asks = (
        "from sglang.kernels.jit.utils import is_arch_support_pdl\ndef moe_fused_gate(): return is_arch_support_pdl()"
    )
    files = {"sglang/__init__.py": "raise ImportError", "sglang/kernels/__init__.py": "raise ImportError"}
    install(site, "sglang", files | {"sglang/kernels/ops/moe/moe_fused_gate.py": asks})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    found = peers._sglang_triton.__wrapped__("moe_fused_gate")
    assert found is not None
    assert (found[0](), found[1]) == (True, "1.2")


def test_a_library_for_another_torch_is_told_of(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import peers

    install(site, "vllm", {"vllm/_moe_C_stable_libtorch.abi3.so": "no library"})
    assert peers._vllm_ops.__wrapped__() is None
    assert capsys.readouterr().out.startswith("vllm 1.2 is not timed: ")


def test_a_peer_that_fails_ends_its_own_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import peers

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("no such\nshape")

    monkeypatch.setattr("benchmarks.timing.graph_time", fails)
    assert peers.measure("theirs", "1.2", fails, lambda: 0.0, launches=2) == []
    assert capsys.readouterr().out == "theirs 1.2 is not timed: RuntimeError: no such shape\n"


@pytest.mark.parametrize("attributes", [{"score": "softmax", "normalize": 1}, GROUPED], ids=["softmax", "grouped"])
def test_routers_of_pytorch(attributes: dict[str, Any]) -> None:
    from benchmarks import peers

    rng = np.random.default_rng(0)
    logits, bias = rng.standard_normal((9, 16), np.float32), rng.standard_normal(16, np.float32)
    ours = bias if attributes is GROUPED else None
    (router,) = peers.routers(3, attributes)
    weights, indices = router.call(
        torch.from_numpy(logits), None if ours is None else torch.from_numpy(ours), None, None
    )
    expected = fused_router(logits, ours, k=3, **attributes)
    np.testing.assert_allclose(weights, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(indices, expected[1])


def test_finalize_of_pytorch() -> None:
    from benchmarks import peers

    rows, weights, places = torch.randn(12, 8), torch.rand(3, 2), torch.randint(0, 12, (3, 2), dtype=torch.int32)
    (finalizer,) = peers.finalizers()
    y = finalizer.call(rows, weights, places, torch.empty(3, 8))
    torch.testing.assert_close(y, (rows[places.long()] * weights[..., None]).sum(1))


@pytest.mark.parametrize("scoring", ["softmax of the chosen", "softmax of all", "sigmoid + bias"])
def test_probs_of_pytorch(scoring: str) -> None:
    from benchmarks.training_peers import pytorch_ops
    from benchmarks.training_works import Work

    rng = np.random.default_rng(1)
    x, grad = rng.standard_normal((2, 7, 20), np.float32)
    bias = rng.standard_normal(20, np.float32)
    work = Work("probs", 20, 5, scoring=scoring)
    given = bias if scoring == "sigmoid + bias" else None
    probs, chosen = pytorch_ops(work)(torch.from_numpy(x), torch.from_numpy(bias))
    expected = router_probs(x, given, **work.attributes)
    np.testing.assert_allclose(probs, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(chosen.bool(), expected[1])
    arrays = (torch.from_numpy(a) for a in (x, grad, expected[1].astype(np.uint8)))
    (got,) = pytorch_ops(Work("probs grad", 20, 5, scoring=scoring))(*arrays)
    np.testing.assert_allclose(got, router_probs_grad(x, expected[1], grad, **work.attributes), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_of_pytorch(scoring: str) -> None:
    from benchmarks.training_peers import pytorch_ops
    from benchmarks.training_works import Work

    x, grad = np.random.default_rng(2).standard_normal((2, 7, 20), np.float32)
    work = Work("scores", 20, 5, scoring=scoring)
    scores, chosen = pytorch_ops(work)(torch.from_numpy(x))
    expected = router_scores(x, **work.attributes)
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5)
    np.testing.assert_array_equal(chosen.bool(), expected[1])
    (got,) = pytorch_ops(Work("scores grad", 20, 5, scoring=scoring))(torch.from_numpy(x), torch.from_numpy(grad))
    np.testing.assert_allclose(got, router_scores_grad(x, grad, **work.attributes), rtol=1e-4, atol=1e-6)


def test_loss_of_pytorch() -> None:
    from benchmarks.training_buffers import COEFF
    from benchmarks.training_peers import pytorch_ops
    from benchmarks.training_works import Work

    rng = np.random.default_rng(3)
    probs, counts = rng.random((7, 20), np.float32), rng.integers(0, 9, 20)
    arrays = (torch.from_numpy(probs), torch.from_numpy(counts))
    work = Work("loss", 20, 5, scoring="", tokens=7)
    (loss,) = pytorch_ops(work)(*arrays)
    np.testing.assert_allclose(loss, aux_loss(probs, counts, k=5, coeff=COEFF), rtol=1e-5)
    (got,) = pytorch_ops(Work("loss grad", 20, 5, scoring="", tokens=7))(*arrays, torch.ones(1))
    np.testing.assert_allclose(
        got, aux_loss_grad(probs.shape, np.float32, counts, np.float32(1), k=5, coeff=COEFF), rtol=1e-5
    )


def test_libraries_are_loaded_by_their_paths(tmp_path: Path) -> None:
    from benchmarks import peers

    assert peers.load(Path(torch.__file__).parent / "lib/libc10.so")
    with pytest.raises(OSError, match=r"none\.so: cannot open shared object file"):
        peers.load(tmp_path / "none.so")
