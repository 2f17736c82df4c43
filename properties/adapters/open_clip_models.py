"""open_clip: its stack of residual attention blocks, with and without the text tower's causal mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.subject.subject import Subject


def _library() -> Any:
    name_operators()
    from open_clip import transformer

    return transformer


def build(config: Any, **options: Any) -> nn.Module:
    """Return a stack of blocks of the drawn sizes."""
    return _library().Transformer(
        config.d_model, config.num_layers, config.num_heads, mlp_ratio=config.d_ff / config.d_model, **options
    )


def build_text(config: Any, **options: Any) -> nn.Module:
    """Return a text tower that gives all of its tokens."""
    return _library().TextTransformer(
        context_length=config.max_len, vocab_size=config.vocab_size + 2, width=config.d_model, heads=config.num_heads,
        layers=config.num_layers, mlp_ratio=config.d_ff / config.d_model, output_dim=config.d_model, output_tokens=True,
        pad_id=config.vocab_size, eos_id=config.vocab_size + 1, **options,
    )  # fmt: skip


def encode_causally(model: Any, x: Any) -> Any:
    """Call the stack under the additive mask that the text tower builds."""
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
    return model(x, attn_mask=mask)


def encode_text(model: Any, tokens: Any) -> Any:
    """Call the text tower on tokens `[B, T]`, padded to its context as its tokenizer does; return `[B, T, D]`."""
    length = tokens.shape[1]
    padded = torch.nn.functional.pad(tokens, (0, model.num_pos - length), value=model.pad_id)
    return model(padded)[1][:, :length]


def encode_padded_text(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a text tower that finds padding by its id."""
    if attention_mask is not None:
        tokens = torch.where(attention_mask, tokens, torch.full_like(tokens, model.pad_id))
    return model(tokens)[1]


def _stack(label: str, causal: bool, **options: Any) -> Subject:
    return Subject(
        kind="encoder", inputs="embeddings", name=f"open_clip Transformer ({label})", build=partial(build, **options),
        forward=encode_causally if causal else call, declares={"causal": causal, "positions": "none"},
    )  # fmt: skip


SHIPPED = {
    "stack": _stack("bidirectional", causal=False),
    "stack-causal": _stack("causal", causal=True),
    "stack-layerscale": _stack("layer scale", causal=False, ls_init_value=0.1),
    "stack-qk-norm": _stack("query-key norm", causal=True, qk_norm=True),
    "stack-cosine": _stack("scaled cosine", causal=True, scaled_cosine_attn=True),
    "stack-normformer": _stack("all scales", causal=True, scale_heads=True, scale_attn=True, scale_attn_inner=True,
                               scale_fc=True),
    "text": Subject(kind="encoder", name="open_clip TextTransformer", build=build_text, forward=encode_text,
                    declares={"causal": True}),
    "text-bidirectional": Subject(
        kind="encoder", name="open_clip TextTransformer (bidirectional, padded)",
        build=partial(build_text, no_causal_mask=True, use_pad_mask=True), forward=encode_padded_text,
        declares={"causal": False, "padding_side": "right"},  # its tokenizers pad behind the text
    ),
}  # fmt: skip
