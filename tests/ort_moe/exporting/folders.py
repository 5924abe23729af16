"""Model folders that are made without PyTorch: right in form, and small."""

from __future__ import annotations

import json
from pathlib import Path


def safetensors(nbytes: int = 4) -> bytes:
    """A file of one tensor of as many bytes."""
    header = json.dumps({"weight": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(nbytes)


def model_folder(path: Path, *, model_type: str = "mixtral", **config: object) -> Path:
    """A folder that looks like a checkpoint."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    (path / "model.safetensors").write_bytes(safetensors())
    return path


def sharded_folder(path: Path) -> Path:
    """One whose weights lie in two files."""
    model_folder(path)
    (path / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        (path / name).write_bytes(safetensors())
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    return path
