"""The model behind a session: what it was created from, and on which provider ONNX Runtime runs each node."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ort_moe.errors import ModelError
from ort_moe.files.loading import load_model

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

RECORD_PROVIDERS = ("session.record_ep_graph_assignment_info", "1")
"""Session configuration entry that has ONNX Runtime remember which node went to which provider."""


def read_model(source: str | os.PathLike[str] | bytes) -> ir.Model | None:
    """A model from its file or its bytes, without external data; None where it cannot be read."""
    import onnx
    import onnx_ir as ir

    try:
        if isinstance(source, bytes):
            return ir.from_proto(onnx.load_model_from_string(source))
        return load_model(source)
    except ModelError:
        return None
    except Exception:  # of protobuf, onnx and onnx_ir, each of its own kind
        return None


def model_of(session: onnxruntime.InferenceSession) -> ir.Model | None:
    """What a session was created from; None where that is not known, or cannot be read any more."""
    # ONNX Runtime has no public name for them.
    source = getattr(session, "_model_path", None) or getattr(session, "_model_bytes", None)
    return None if source is None else read_model(source)


def nodes_on(session: onnxruntime.InferenceSession, provider: str) -> list[tuple[str, str]]:
    """Name and operator of each node that a session runs on a provider, if it was created with RECORD_PROVIDERS."""
    return [
        (node.name, node.op_type)
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == provider
        for node in part.get_nodes()
    ]
