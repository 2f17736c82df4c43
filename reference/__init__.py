"""The textbook Transformer made executable: short, exact, readable beside the paper.

The public names are loaded when first used, so that importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Config": "config",
    "softmax": "attention",
    "MultiHeadAttention": "attention",
    "MultiViewClassifier": "views",
    "KVCache": "cache",
    "SinusoidalPositions": "positions",
    "LearnedPositions": "positions",
    "Rotary": "rotary",
    "AlibiBias": "position_bias",
    "T5Bias": "position_bias",
    "LayerNorm": "normalization",
    "RMSNorm": "normalization",
    "FeedForward": "feedforward",
    "GatedFeedForward": "feedforward",
    "EncoderLayer": "blocks",
    "DecoderLayer": "blocks",
    "Encoder": "model",
    "Decoder": "model",
    "EncoderDecoder": "model",
    "Classifier": "model",
    "build": "model",
    "greedy": "generation",
    "count_parameters": "counting",
    "count_flops": "counting",
    "cross_entropy": "objectives",
    "next_token_loss": "objectives",
    "accumulated_loss": "objectives",
    "mask_tokens": "objectives",
    "noam": "schedules",
    "linear": "schedules",
    "cosine": "schedules",
    "parameter_groups": "schedules",
    "BytePairEncoding": "tokenization",
    "WordPiece": "tokenization",
    "Unigram": "tokenization",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"veriformer.reference has no {name!r}; it has: {', '.join(_HOMES)}")
    return getattr(importlib.import_module(f"veriformer.reference.{_HOMES[name]}"), name)
