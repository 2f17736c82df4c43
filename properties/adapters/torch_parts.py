"""torch: softmax, norms, and positions kept in an nn.Embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veriformer.properties.subject import DrawnConfig, Subject


def softmax(model: Any, scores: Any, dim: int = -1) -> Any:
    """Call F.softmax."""
    return functional.softmax(scores, dim)


def apply(model: Any, x: Any) -> Any:
    """Call the model on x `[B, T, D]`."""
    return model(x)


def build_layer_norm(config: Any) -> nn.Module:
    """Return a LayerNorm of the drawn width."""
    return nn.LayerNorm(config.d_model)


def build_rms_norm(config: Any) -> nn.Module:
    """Return an RMSNorm of the drawn width."""
    return nn.RMSNorm(config.d_model)


def build_table(config: Any) -> nn.Module:
    """Return a table of learned positions."""
    return nn.Embedding(config.max_len, config.d_model)


def rows(model: Any, length: int) -> Any:
    """Return the first rows of the table, `[T, D]`."""
    return model(torch.arange(length, device=model.weight.device))


SHIPPED = {
    "softmax": Subject(kind="softmax", name="F.softmax", forward=softmax),
    "LayerNorm": Subject(
        kind="norm", name="nn.LayerNorm", build=build_layer_norm, forward=apply, declares={"norm": "layer"}
    ),
    "RMSNorm": Subject(kind="norm", name="nn.RMSNorm", build=build_rms_norm, forward=apply, declares={"norm": "rms"}),
    "Embedding": Subject(
        kind="positions",
        name="nn.Embedding as learned positions",
        build=build_table,
        forward=rows,
        declares={"positions": "learned", "beyond_max_len": "error"},
    ),
}

_CLASSES = {nn.LayerNorm: "LayerNorm", nn.RMSNorm: "RMSNorm"}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise F.softmax, nn.Softmax, norms (class or instance), and nn.Embedding where positions are asked for."""
    if thing in (functional.softmax, torch.softmax):
        return SHIPPED["softmax"]
    if isinstance(thing, nn.Softmax):
        return Subject(kind="softmax", name="nn.Softmax", module=thing, forward=lambda m, scores: m(scores))
    if isinstance(thing, type):
        if thing is nn.Embedding and kind == "positions":
            return SHIPPED["Embedding"]
        return SHIPPED[_CLASSES[thing]] if thing in _CLASSES else None
    if isinstance(thing, nn.LayerNorm | nn.RMSNorm) and len(thing.normalized_shape) == 1:
        like = SHIPPED[_CLASSES[nn.LayerNorm if isinstance(thing, nn.LayerNorm) else nn.RMSNorm]]
        sizes = DrawnConfig(d_model=thing.normalized_shape[0], num_heads=1)
        return Subject(kind="norm", name=like.name, module=thing, forward=apply, config=sizes, declares=like.declares)
    if isinstance(thing, nn.Embedding) and kind == "positions":
        sizes = DrawnConfig(d_model=thing.embedding_dim, num_heads=1, max_len=thing.num_embeddings)
        facts = SHIPPED["Embedding"].declares
        return Subject(kind="positions", name="nn.Embedding", module=thing, forward=rows, config=sizes, declares=facts)
    return None
