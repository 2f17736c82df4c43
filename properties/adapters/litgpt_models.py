"""litgpt: one GPT whose configuration makes the families."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject


def build(config: Any, released: str, **options: Any) -> nn.Module:
    """Return the GPT of a released configuration, of the drawn sizes; a sliding window has three tokens.

    Args:
        config: the drawn sizes.
        released: name of the configuration.
        options: of it, instead of the released ones.
    """
    from litgpt.config import Config
    from litgpt.model import GPT

    like = Config.from_name(released)
    groups = (
        config.num_heads if like.n_query_groups == like.n_head else min(config.num_key_value_heads, config.num_heads)
    )
    sizes = {
        "block_size": config.max_len,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.d_model,
        "head_size": config.d_head,
        "n_query_groups": 1 if like.n_query_groups == 1 else groups,
        "intermediate_size": config.d_ff,
    }
    if like.n_expert:
        sizes |= {"n_expert": 4, "n_expert_per_token": 2}
        if like.moe_intermediate_size:
            sizes["moe_intermediate_size"] = config.d_ff
    if like.sliding_window_size is not None:
        sizes["sliding_window_size"] = WINDOW
        sizes["sliding_window_indices"] = _indices(like.sliding_window_indices or [], config.num_layers)
    if like.rope_indices:
        sizes["rope_indices"] = _indices(like.rope_indices, config.num_layers)
    if like.attention_scores_scalar is not None:
        sizes["attention_scores_scalar"] = config.d_head
    return GPT(Config.from_name(released, **{**sizes, **options}))


def _indices(pattern: list[int], layers: int) -> list[int]:
    """Return a pattern of as many layers that has both of its kinds, where the released one has and there is room."""
    kinds = [next(i for i in pattern if i == kind) for kind in sorted(set(pattern), reverse=True)]
    return (kinds * layers)[:layers]


def forward(model: Any, tokens: Any) -> Any:
    """Call the GPT on tokens `[B, T]`; it takes no mask."""
    return model(tokens)


def cached(model: Any, chunks: Any) -> Any:
    """Return the logits `[B, T, V]` chunk by chunk through the cache that the model keeps.

    A chunk longer than a sliding window is handed over in parts, as its error asks.
    """
    if any(block.attn.apply_sliding_window_attention for block in model.transformer.h):
        chunks = [part for chunk in chunks for part in chunk.split(model.config.sliding_window_size, dim=1)]
    batch, device = chunks[0].shape[0], chunks[0].device
    dtype = next(model.parameters()).dtype
    start, outputs = 0, []
    model.set_kv_cache(batch_size=batch, device=device, dtype=dtype)
    try:
        for chunk in chunks:
            positions = torch.arange(start, start + chunk.shape[1], device=device)
            outputs.append(model(chunk, positions))
            start += chunk.shape[1]
    finally:
        model.clear_kv_cache()
    return torch.cat(outputs, dim=1)


WINDOW = 3
_RELEASED: Mapping[str, str] = {
    "pythia": "pythia-14m",
    "llama2": "Llama-2-7b-hf",
    "llama3": "Llama-3-8B",
    "llama3_1": "Llama-3.1-8B",
    "falcon": "falcon-7b",
    "stablelm": "stablelm-3b-4e1t",
    "phi2": "phi-2",
    "phi3": "Phi-3-mini-4k-instruct",
    "gemma": "Gemma-2b",
    "gemma2": "Gemma-2-2b",
    "gemma3": "Gemma-3-1b-it",
    "mistral": "Mistral-7B-v0.1",
    "mixtral": "Mixtral-8x7B-v0.1",
    "olmo": "OLMo-1B-hf",
    "olmo2": "OLMo-2-1124-7B",
    "qwen2_5": "Qwen2.5-0.5B",
    "qwen3": "Qwen3-0.6B",
    "codegemma": "CodeGemma-7b-it",
    "smollm2": "SmolLM2-135M",
    "tiny-llama": "tiny-llama-1.1b",
}
_OPTIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma2-no-cap": ("Gemma-2-2b", {"attention_logit_softcapping": None}),
    "gemma2-windowed": ("Gemma-2-2b", {"attention_logit_softcapping": None, "sliding_window_indices": [1] * 16}),
    "pythia-sequential": ("pythia-14m", {"parallel_residual": False}),
    "llama3-linear-rope": ("Llama-3-8B", {"rope_adjustments": {"factor": 2.0}}),
    "phi3-full": ("Phi-3-mini-4k-instruct", {"sliding_window_size": None, "sliding_window_indices": None}),
}
"""Options of one configuration, and what it is released with."""


def _gpt(name: str, released: str, **options: Any) -> Subject:
    windowed = name in ("mistral", "phi3", "gemma2-windowed")  # every layer has the window
    return Subject(
        kind="decoder",
        name=f"litgpt {released}" + (f" ({name})" if options else ""),
        build=partial(build, released=released, **options),
        forward=forward,
        cache=cached,
        mask_forms=(),
        domain={"d_model": (16, 32), "num_heads": (2, 4), "num_key_value_heads": (2,), "max_len": (40,)},
        declares={"window": WINDOW} if windowed else {},
    )


SHIPPED = {
    **{name: _gpt(name, released) for name, released in _RELEASED.items()},
    **{name: _gpt(name, released, **options) for name, (released, options) in _OPTIONS.items()},
}
