"""torchtune: its builders of decoder families, of small sizes."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject


def build(config: Any, family: str, builder: str, **options: Any) -> nn.Module:
    """Return a decoder of one family, of the drawn sizes."""
    make = getattr(importlib.import_module(f"torchtune.models.{family}"), builder)
    sizes = {
        "vocab_size": config.vocab_size, "num_layers": config.num_layers, "num_heads": config.num_heads,
        "num_kv_heads": config.num_key_value_heads, "embed_dim": config.d_model, "max_seq_len": config.max_len,
        "intermediate_dim": config.d_ff, "attn_dropout": config.dropout,
    }  # fmt: skip
    options = {name: value(config) if callable(value) else value for name, value in options.items()}
    return make(**{**sizes, **options})


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call the decoder; padding goes into its mask `[B, T, T]`, True = may attend, and positions count real tokens."""
    if attention_mask is None:
        return model(tokens)
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    mask = causal & attention_mask[:, None, :] | torch.eye(length, dtype=torch.bool, device=tokens.device)
    positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return model(tokens, mask=mask, input_pos=positions)


def cached(model: Any, chunks: Any) -> Any:
    """Return the logits `[B, T, V]` chunk by chunk through the cache that the model keeps."""
    batch, device = chunks[0].shape[0], chunks[0].device
    length = sum(chunk.shape[1] for chunk in chunks)
    dtype = next(model.parameters()).dtype
    with device:
        model.setup_caches(batch, dtype, decoder_max_seq_len=length)
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    start, outputs = 0, []
    try:
        for chunk in chunks:
            positions = torch.arange(start, start + chunk.shape[1], device=device)
            mask = causal[positions].expand(batch, -1, -1)
            outputs.append(model(chunk, mask=mask, input_pos=positions.expand(batch, -1)))
            start += chunk.shape[1]
    finally:
        for layer in model.layers:
            layer.attn.kv_cache, layer.attn.cache_enabled = None, False
    return torch.cat(outputs, dim=1)


def _decoder(label: str, family: str, builder: str, **options: Any) -> Subject:
    """Name a decoder; gemma2 has a window in every layer but each second one, so that none is declared."""
    return Subject(
        kind="decoder", name=f"torchtune {label}", build=partial(build, family=family, builder=builder, **options),
        forward=forward, mask_forms=("padding",), cache=cached,
        domain={"d_model": (16, 32), "num_heads": (2, 4), "num_key_value_heads": (2,), "max_len": (40,)},
    )  # fmt: skip


SHIPPED = {
    "llama2": _decoder("Llama 2", "llama2", "llama2"),
    "llama3": _decoder("Llama 3", "llama3", "llama3"),
    "llama3_1": _decoder("Llama 3.1", "llama3_1", "llama3_1"),
    "mistral": _decoder("Mistral", "mistral", "mistral"),
    "qwen2": _decoder("Qwen 2", "qwen2", "qwen2"),
    "qwen2-tied": _decoder("Qwen 2 (tied)", "qwen2", "qwen2", tie_word_embeddings=True),
    "phi3": _decoder("Phi 3", "phi3", "phi3"),
    "gemma": _decoder("Gemma", "gemma", "gemma", head_dim=lambda c: c.d_head),
    "gemma2": _decoder("Gemma 2", "gemma2", "gemma2", head_dim=lambda c: c.d_head, sliding_window_size=3,
                       query_pre_attn_scalar=lambda c: c.d_head),
    "gemma2-full": _decoder("Gemma 2 (no window)", "gemma2", "gemma2", head_dim=lambda c: c.d_head,
                            sliding_window_size=None, query_pre_attn_scalar=lambda c: c.d_head),
    "llama3_2": _decoder("Llama 3.2 (tied)", "llama3_2", "llama3_2"),
}  # fmt: skip
