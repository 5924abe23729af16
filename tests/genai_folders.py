"""Model folders as onnxruntime-genai's builder writes them, with models and texts made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from tests.ort_moe.tiny_models import original, save


def config(**decoder: Any) -> dict[str, Any]:
    """What a genai_config.json holds; `decoder` is further or other keys of its decoder."""
    return {
        "model": {
            "bos_token_id": 1,
            "context_length": 64,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": 16,
                **decoder,
            },
            "type": "gptoss",
            "vocab_size": 96,
        },
        "search": {"max_length": 64, "top_p": 0.95},
    }


def genai_folder(
    path: Path,
    document: Mapping[str, Any] | None = None,
    models: Mapping[str, onnx.ModelProto] | None = None,
) -> Path:
    """Writes a folder: the models, with their weights in files named after them, and texts in two levels."""
    path.mkdir(parents=True)
    (path / "genai_config.json").write_text(json.dumps(document or config(), indent=4), encoding="utf-8")
    for name, model in (models or {"model.onnx": original()}).items():
        (path / name).parent.mkdir(exist_ok=True)
        save(model, path / name, data=f"{Path(name).name}.data")
    (path / "tokenizer.json").write_bytes(b'{"\xc3\xa9": 1}\r\n')
    (path / "adapters").mkdir()
    (path / "adapters" / "one.onnx_adapter").write_bytes(bytes(range(256)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """What is in a folder, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
