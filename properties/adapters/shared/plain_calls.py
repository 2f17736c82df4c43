"""Calls that fit many libraries: a model of tokens or embeddings, with or without a mask of one of the usual names."""

from __future__ import annotations

from typing import Any

import torch


def call(model: Any, x: Any) -> Any:
    """Call the model on tokens `[B, T]` or embeddings `[B, T, D]`."""
    return model(x)


def call_with_mask(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call a model whose `mask` `[B, T]` says True = may attend."""
    return model(x, mask=attention_mask)


def call_with_input_mask(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call a model whose `input_mask` `[B, T]` says True = may attend."""
    return model(x, input_mask=attention_mask)


def causal_mask(length: int, device: Any) -> Any:
    """Return `[T, T]`, True = may attend."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
