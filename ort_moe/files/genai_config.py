"""genai_config.json, by which onnxruntime-genai finds the models of a folder and how it opens them.

Facts about it, tried with onnxruntime-genai 0.8 to 0.18: the file tells no version so far, and other keys than
onnxruntime-genai knows are errors in most places. `custom_ops_library` in `session_options` names one library. A
relative path counts from the model's folder since 0.9.1; since 0.16 the library must lie there, and not behind a link.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ort_moe.errors import ModelError

NAME = "genai_config.json"
"""Name of the file."""

LIBRARY_KEY = "custom_ops_library"

_OPTIONS = "session_options"
_VERSION_KEYS = ("version", "config_version", "schema_version")
_KNOWN_VERSIONS = ("1", "1.0")
_PROVIDERS = {"cpu": "cpu", "cuda": "cuda"}
"""Where our nodes have kernels, by the names of execution providers there."""
_SHOWN = 20
"""Characters of a number, at most."""


@dataclass(frozen=True)
class GenaiConfig:
    """A genai_config.json that was read.

    Attributes:
        path: The file.
        text: What is in it.
    """

    path: Path
    text: str

    @cached_property
    def document(self) -> dict[str, Any]:
        """The text, parsed."""
        parsed = json.loads(self.text)
        assert isinstance(parsed, dict)
        return parsed

    @property
    def models(self) -> tuple[str, ...]:
        """File names of the ONNX models that it names, relative to its folder, each once and in its shortest form."""
        return tuple(dict.fromkeys(os.path.normpath(component["filename"]) for component in _components(self.document)))

    @property
    def providers(self) -> tuple[str, ...]:
        """Names of the execution providers that the decoder is opened with, beside the CPU's."""
        listed = _decoder(self.document).get(_OPTIONS, {}).get("provider_options", [])
        return tuple(name for options in listed for name in options)

    @property
    def target(self) -> Literal["cuda", "cpu"]:
        """Where the decoder runs."""
        return "cuda" if "cuda" in map(_plain, self.providers) else "cpu"

    @property
    def strange_providers(self) -> tuple[str, ...]:
        """Execution providers for which there are no kernels of ours."""
        return tuple(name for name in self.providers if _plain(name) not in _PROVIDERS)

    def with_library(self, library: str, models: Collection[str]) -> str:
        """The text of a configuration that also has sessions of these models opened with the library.

        Args:
            library: Its file name.
            models: Some of `models`.

        Raises:
            ModelError: It names another library, and there can be but one.
        """
        document = json.loads(self.text)
        for component in list(_components(document)):
            if os.path.normpath(component["filename"]) not in models:
                continue
            # Components without options of their own are opened with the decoder's.
            owner = component if isinstance(component.get(_OPTIONS), dict) else _decoder(document)
            options = owner.setdefault(_OPTIONS, {})
            other = options.get(LIBRARY_KEY)
            if other not in (None, "") and os.path.basename(str(other)) != library:
                raise ModelError(
                    f"{self.path} registers the library '{other}' of other custom ops, and onnxruntime-genai takes but "
                    "one: `--target contrib` needs none"
                )
            options[LIBRARY_KEY] = library
        if document == self.document:
            return self.text
        indent = re.search(r"\n([ \t]+)\"", self.text)
        end = "\n" if self.text.endswith("\n") else ""
        return json.dumps(document, indent=indent[1] if indent else None, ensure_ascii=False) + end


def read_config(folder: Path) -> GenaiConfig:
    """Reads the configuration of a model folder.

    Raises:
        ModelError: The folder has none, or it is no configuration, or of a version that is not known; or it names no
            decoder, or a model outside the folder.
    """
    path = folder / NAME
    if not path.is_file():
        raise ModelError(no_config(folder))
    try:
        config = GenaiConfig(path, path.read_bytes().decode("utf-8"))
        document = json.loads(config.text, parse_constant=_number, parse_float=_number, parse_int=_whole)
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        half = rf"\u{ord(error.object[error.start]):04x}"
        raise ModelError(f"{path} has the escape {half}, half of a surrogate pair, which is no character") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from error
    except _NoNumberError as error:
        raise ModelError(f"{path} has the number {error}, which neither JSON nor a float64 can hold") from error
    except RecursionError as error:
        raise ModelError(f"{path} is not a configuration of onnxruntime-genai: it is nested too deep") from error
    _check(path, document)
    return config


class _NoNumberError(ValueError):
    """One that would be written anew as what is no JSON."""


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NoNumberError(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... of {len(text)} characters")
    return number


def _whole(text: str) -> int:
    _number(text)  # else Python refuses the longest with advice for programmers
    return int(text)


def _check(path: Path, document: Any) -> None:
    sections = document.get("model") if isinstance(document, dict) else None
    if not isinstance(sections, dict):
        raise ModelError(f"{path} is not a configuration of onnxruntime-genai: it has no section 'model'")
    for key in _VERSION_KEYS:
        version = document.get(key, sections.get(key))
        if version is not None and str(version) not in _KNOWN_VERSIONS:
            raise ModelError(f"{path} has the {key} {version!r}, and this ort-moe knows configurations of version 1")
    decoder = sections.get("decoder")
    if not isinstance(decoder, dict):
        others = ", ".join(f"'{name}'" for name, value in sections.items() if isinstance(value, dict)) or "none"
        raise ModelError(f"{path} names no decoder: its section 'model' must have a 'decoder', its parts are {others}")
    if not any(True for _ in _components(decoder)):
        raise ModelError(f"{path}: the decoder names no ONNX model, as its 'filename' does")
    options = decoder.get(_OPTIONS, {})
    listed = options.get("provider_options", []) if isinstance(options, dict) else None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ModelError(f"{path}: the decoder's {_OPTIONS} are not such as onnxruntime-genai reads")
    for component in _components(document):
        name = component["filename"]
        if "\0" in name:
            raise ModelError(f"{path} names the model {name!r}, which no file can be called")
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ModelError(f"{path} names the model '{name}', which lies outside its folder")


def no_config(folder: Path) -> str:
    """Why a folder without a configuration is no model folder, and what to name in its place."""
    sentence = f"{folder} is no model folder of onnxruntime-genai: it has no {NAME}"
    if (folder / "manifest.json").is_file():
        return f"{sentence}, but a manifest.json: of a model package, name the folder of one variant"
    if models := sorted(path.name for path in folder.glob("*.onnx")):
        return f"{sentence}; for one model, name its file, such as {folder / models[0]}"
    if (folder / "config.json").is_file():
        return f"{sentence}, but a config.json, as of a model that is yet to be exported: `ort-moe export` does that"
    return f"{sentence}, and no ONNX model"


def _components(section: Any) -> Iterator[dict[str, Any]]:
    """The parts of a configuration that name an ONNX model each, in order."""
    if isinstance(section, dict):
        name = section.get("filename")
        if isinstance(name, str) and name.endswith(".onnx"):
            yield section
        for each in section.values():
            yield from _components(each)
    elif isinstance(section, list):
        for each in section:
            yield from _components(each)


def _decoder(document: dict[str, Any]) -> dict[str, Any]:
    decoder: dict[str, Any] = document["model"]["decoder"]
    return decoder


def _plain(provider: str) -> str:
    return provider.lower().removesuffix("executionprovider")
