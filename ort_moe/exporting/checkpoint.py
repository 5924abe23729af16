"""A Hugging Face model folder, looked at without PyTorch and without reading its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ort_moe.errors import ModelError
from ort_moe.files.readable import check_readable
from ort_moe.printing.wording import counted

CONFIG = "config.json"
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
UNPACKED = ("mxfp4", "fp8")
"""Quantizations that transformers undoes while it loads."""

_MOST_PACKED = 2
"""Weights of theirs in an element of a file, at most."""

_CARRIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*")
"""Of the folder's own files, what goes along with an export: configurations, tokenizer and terms of use."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that a model can be loaded from.

    Attributes:
        folder: Its absolute path.
        config: What `config.json` says.
        weights: The files that hold the weights.
        numbers: How many numbers these hold, at most.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    numbers: int

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Looks at a folder.

        Raises:
            ModelError: It is no model folder, or its weights or the files beside them are not all there or cannot be
                read, or the weights are quantized in a way that stays.
        """
        path = Path(os.path.abspath(folder))
        if not path.exists():
            raise ModelError(f"cannot read {path}: there is no such folder")
        if not path.is_dir():
            raise ModelError(f"{path} is a file: a Hugging Face model folder is expected, which holds {CONFIG}")
        config = _read_config(path)
        quantization = config.get("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        if method and method not in UNPACKED:
            raise ModelError(
                f"{path}: its weights are quantized ({method}), and only {' and '.join(UNPACKED)} can be undone: "
                "export the unquantized model, and pack it with `ort-moe optimize --weights`"
            )
        weights = _weights(path)
        for link in sorted(each for each in _along(path) if each.is_symlink() and not each.exists()):
            raise ModelError(f"cannot read {link}: it is a link to a file that is not there")
        for file in weights:
            check_readable(file)
        stored = sum(map(_stored, weights))
        checkpoint = cls(path, config, weights, stored * _MOST_PACKED if method else stored)
        for file in checkpoint.carried:
            check_readable(file)
        return checkpoint

    @property
    def model_type(self) -> str:
        """The name of the architecture."""
        return str(self.config["model_type"])

    @property
    def carried(self) -> tuple[Path, ...]:
        """The files that go along with an export, sorted."""
        return tuple(sorted(path for path in _along(self.folder) if path.is_file()))


def _along(folder: Path) -> set[Path]:
    """What is in the folder under a name of files that go along, links that lead nowhere too."""
    found = {path for pattern in _CARRIED for path in folder.glob(pattern)}
    return {path for path in found if not path.name.endswith(".index.json")}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        hint = ""
        if (folder / "genai_config.json").exists() or any(folder.glob("*.onnx")):
            hint = "; it holds ONNX already, which `ort-moe optimize` takes"
        raise ModelError(f"{folder} is no Hugging Face model folder: there is no {CONFIG} in it{hint}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path} is no configuration of a model: it is nested too deep") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} names no architecture: 'model_type' is expected")
    return config


def _weights(folder: Path) -> tuple[Path, ...]:
    """The files of weights, all of which are there."""
    for name in _SINGLE_FILES:
        if (folder / name).is_file():
            return (folder / name,)
    for name in _INDEX_FILES:
        if (folder / name).is_file():
            return _sharded(folder / name)
    raise ModelError(
        f"{folder} holds no weights: {' or '.join(_SINGLE_FILES)} is expected, or one of their index files"
    )


def _sharded(index: Path) -> tuple[Path, ...]:
    """The files that an index names."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = tuple(index.parent / name for name in names)
    except OSError as error:
        raise ModelError(f"cannot read {index}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is no index of weights: 'weight_map' is expected, with a file for each") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        others = f" (and {counted(len(missing) - 1, 'more file')})" if len(missing) > 1 else ""
        raise ModelError(
            f"{index.parent}: weights are missing: {index.name} names {missing[0]}, which is not there{others}"
        )
    return files


def _stored(file: Path) -> int:
    """How many elements a file of weights has, at most; it is whole as far as can be told without reading them."""
    with file.open("rb") as opened:
        head = opened.read(8)
        if head.startswith(b"version "):
            raise ModelError(f"{file} is a Git LFS pointer and no weights: fetch them with `git lfs pull`")
        if file.suffix == ".safetensors":
            return _in_safetensors(file, int.from_bytes(head, "little"), opened.read)
    return file.stat().st_size  # of PyTorch's own files that much is known: none is smaller than a byte


def _in_safetensors(file: Path, header_size: int, read: Any) -> int:
    """The same by a header, whose size in 8 bytes a file starts with; it also says how long the file is."""
    size = file.stat().st_size
    expected, elements = 8 + header_size, 0
    if expected <= size:
        try:
            tensors = json.loads(read(header_size))
            entries = [entry for name, entry in tensors.items() if name != "__metadata__"]
            expected += max((entry["data_offsets"][1] for entry in entries), default=0)
            elements = sum(prod(entry["shape"]) for entry in entries)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ModelError(f"{file} is not in the format safetensors: its header cannot be read") from error
    if expected > size:
        raise ModelError(f"{file} is cut short or damaged: it should have {expected} bytes, and has {size}")
    return elements
