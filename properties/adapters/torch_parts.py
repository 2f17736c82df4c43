"""torch: softmax, norms, positions kept in an nn.Embedding, and the cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


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


def cross_entropy(model: Any, logits: Any, labels: Any) -> Any:
    """Call F.cross_entropy with the positions in a row."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def linear_cross_entropy(model: Any, logits: Any, labels: Any) -> Any:
    """Call F.linear_cross_entropy, which projects and judges at once; here one of its two factors is the identity.

    The smaller one: of the vocabulary's size it would have ten gigabytes at 50,257 pieces.
    """
    rows, labels = logits.flatten(0, -2), labels.flatten()
    size = min(rows.shape)
    identity = torch.eye(size, dtype=logits.dtype, device=logits.device)
    given, weight = (identity, rows.T) if len(rows) == size else (rows, identity)
    return functional.linear_cross_entropy(given, weight, labels)


def smoothed_cross_entropy(model: Any, logits: Any, labels: Any) -> Any:
    """Call F.cross_entropy with label smoothing 0.1."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def call_criterion(model: Any, logits: Any, labels: Any) -> Any:
    """Call an nn.CrossEntropyLoss with the positions in a row."""
    return model(logits.flatten(0, -2), labels.flatten())


_LOSS = {"shifts_labels": False, "empty_loss": "nan"}

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
    "cross-entropy": Subject(kind="loss", name="F.cross_entropy", forward=cross_entropy, declares=_LOSS),
    "smoothed-cross-entropy": Subject(
        kind="loss",
        name="F.cross_entropy(label_smoothing=0.1)",
        forward=smoothed_cross_entropy,
        declares={"label_smoothing": 0.1, **_LOSS},
    ),
}

if hasattr(functional, "linear_cross_entropy"):  # torch 2.11 has none yet
    SHIPPED["linear-cross-entropy"] = Subject(
        kind="loss", name="F.linear_cross_entropy", forward=linear_cross_entropy, declares=_LOSS
    )

_CLASSES = {nn.LayerNorm: "LayerNorm", nn.RMSNorm: "RMSNorm"}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise F.softmax, nn.Softmax, norms (class or instance), and nn.Embedding where positions are asked for."""
    if thing in (functional.softmax, torch.softmax):
        return SHIPPED["softmax"]
    if isinstance(thing, nn.Softmax):
        return Subject(kind="softmax", name="nn.Softmax", module=thing, forward=lambda m, scores: m(scores))
    if thing is functional.cross_entropy:
        return SHIPPED["cross-entropy"]
    if isinstance(thing, nn.CrossEntropyLoss) and thing.reduction == "mean" and thing.weight is None:
        said = {**_LOSS, "ignore_index": thing.ignore_index}
        said |= {"label_smoothing": thing.label_smoothing} if thing.label_smoothing else {}
        return Subject(kind="loss", name="nn.CrossEntropyLoss", module=thing, forward=call_criterion, declares=said)
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
