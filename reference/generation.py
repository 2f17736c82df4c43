"""Greedy generation: the most probable token, again and again."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.reference.model import Decoder


def greedy(model: Decoder, tokens: Tensor, steps: int, *, use_cache: bool = True) -> Tensor:
    """Return `tokens` `[B, T]` followed by `steps` tokens, each the argmax of the logits at the position before it.

    Args:
        model: a decoder.
        tokens: int64 `[B, T]`, T >= 1.
        steps: number of tokens to append.
        use_cache: keep keys and values, so that a step costs one token rather than all of them.
    """
    cache = model.new_cache() if use_cache else None
    new = tokens
    with torch.no_grad():
        for _ in range(steps):
            logits = model(new if use_cache else tokens, cache=cache)
            new = logits[:, -1:].argmax(dim=-1)
            tokens = torch.cat([tokens, new], dim=1)
    return tokens
