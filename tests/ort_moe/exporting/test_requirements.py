"""What is said where PyTorch or transformers is missing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ort_moe.errors import EnvironmentUnfitError
from ort_moe.exporting.requirements import require_exporter


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    with pytest.raises(EnvironmentUnfitError) as unfit:
        require_exporter()
    assert str(unfit.value) == (
        f"an export needs PyTorch and transformers, and {missing} is not installed: install ort-moe[export]"
    )


@pytest.mark.parametrize("exporters", [None, ModuleType("transformers.exporters")])
def test_too_old(monkeypatch: pytest.MonkeyPatch, exporters: ModuleType | None) -> None:
    """Without an exporter, and with one but without the classes that ours takes."""
    old = ModuleType("transformers")
    monkeypatch.setattr(old, "__version__", "4.40.0", raising=False)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.setitem(sys.modules, "transformers.exporters", exporters)
    monkeypatch.delitem(sys.modules, "ort_moe.exporting.architecture", raising=False)
    with pytest.raises(
        EnvironmentUnfitError, match=r"transformers 4\.40\.0 has no exporter.*install ort-moe\[export\]"
    ):
        require_exporter()
