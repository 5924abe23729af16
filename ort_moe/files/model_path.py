"""Which file is meant where a folder is given in place of a model, and names that ONNX Runtime takes."""

from __future__ import annotations

import os
from pathlib import Path

from ort_moe.errors import ModelError, OutputError
from ort_moe.files import genai_config
from ort_moe.printing.wording import some_of


def model_file(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path, or of a folder, the one model in it: that its genai_config.json names, or that is there.

    Raises:
        ModelError: There are several, or none; the message says what to give in its place.
    """
    if not os.path.isdir(path):
        return path
    folder = Path(path)
    if (folder / genai_config.NAME).is_file():
        names = list(genai_config.read_config(folder).models)
    else:
        names = sorted(each.name for each in folder.glob("*.onnx"))
    if not names:
        raise ModelError(genai_config.no_config(folder))
    if len(names) > 1:
        raise ModelError(
            f"{folder} is a folder of {len(names)} models: name the file of one, {some_of(names, 4, 'or')}"
        )
    return folder / names[0]


def is_utf8(path: str | os.PathLike[str]) -> bool:
    """Whether the path is text, as ONNX Runtime takes them; to the file system it is bytes."""
    try:
        os.fspath(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_output_name(path: str | os.PathLike[str]) -> None:
    """Looks whether ONNX Runtime will open what is written there.

    Raises:
        OutputError: The name, or that of a folder that it lies in, is not UTF-8.
    """
    final = os.path.abspath(path)
    if not is_utf8(final):
        raise OutputError(f"cannot write {final}: this is not UTF-8, and ONNX Runtime opens no other names")
