"""transformer-lens 2: its HookedTransformer in the shapes of several families."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject


def build(config: Any, **options: Any) -> nn.Module:
    """Return a HookedTransformer of the drawn sizes."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    options = {name: value(config) if callable(value) else value for name, value in options.items()}
    return HookedTransformer(
        HookedTransformerConfig(
            **{
                "n_layers": config.num_layers,
                "d_model": config.d_model,
                "n_ctx": config.max_len,
                "d_head": config.d_head,
                "n_heads": config.num_heads,
                "d_mlp": config.d_ff,
                "d_vocab": config.vocab_size,
                "act_fn": "gelu",
                "device": "cpu",
                "seed": 0,
                **options,
            }
        )
    )


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call the model on tokens `[B, T]`; attention_mask `[B, T]` True = may attend."""
    if attention_mask is None:
        return model(tokens)
    return model(tokens, attention_mask=attention_mask.long())


def cached(model: Any, chunks: Any) -> Any:
    """Return the logits `[B, T, V]` chunk by chunk through its key-value cache."""
    from transformer_lens import HookedTransformerKeyValueCache

    cache = HookedTransformerKeyValueCache.init_cache(model.cfg, chunks[0].device, chunks[0].shape[0])
    return torch.cat(
        [model(chunk, past_kv_cache=cache, attention_mask=torch.ones_like(chunk)) for chunk in chunks], dim=1
    )


_WINDOW = 3
_FACTS: Mapping[str, Mapping[str, Any]] = {
    "local": {"window": _WINDOW},
    # positions are added to queries and keys of every layer and not to values: the norm is not the last before them
    "shortformer": {"structure": "other", "norm": "other"},
}
_SHAPES: Mapping[str, dict[str, Any]] = {
    "gpt2": {"normalization_type": "LN"},
    "no-norm": {"normalization_type": None},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": lambda c: c.d_head, "normalization_type": "LN"},
    "rotary-half": {
        "positional_embedding_type": "rotary",
        "rotary_dim": lambda c: c.d_head // 2,
        "normalization_type": "LN",
        "parallel_attn_mlp": True,
    },
    "llama": {
        "positional_embedding_type": "rotary",
        "rotary_dim": lambda c: c.d_head,
        "normalization_type": "RMS",
        "gated_mlp": True,
        "act_fn": "silu",
        "final_rms": True,
    },
    "grouped": {
        "positional_embedding_type": "rotary",
        "rotary_dim": lambda c: c.d_head,
        "normalization_type": "RMS",
        "n_key_value_heads": lambda c: c.num_heads // 2,
        "gated_mlp": True,
        "act_fn": "silu",
    },
    "alibi": {"positional_embedding_type": "alibi", "normalization_type": "LN"},
    "shortformer": {"positional_embedding_type": "shortformer", "normalization_type": "LN"},
    "attention-only": {"attn_only": True, "normalization_type": "LN"},
    "adjacent-pairs": {
        "positional_embedding_type": "rotary",
        "rotary_dim": lambda c: c.d_head,
        "rotary_adjacent_pairs": True,
        "normalization_type": "RMS",
        "use_qk_norm": True,
    },
    "local": {
        "use_local_attn": True,
        "attn_types": lambda c: ["local"] * c.num_layers,
        "window_size": _WINDOW,
        "normalization_type": "LN",
    },
    "local-global": {
        "positional_embedding_type": "rotary",
        "rotary_dim": lambda c: c.d_head,
        "use_local_attn": True,
        "attn_types": lambda c: (["local", "global"] * c.num_layers)[: c.num_layers],
        "window_size": _WINDOW,
        "normalization_type": "RMS",
    },
    "ungrouped": {
        "positional_embedding_type": "rotary",
        "rotary_dim": lambda c: c.d_head,
        "normalization_type": "RMS",
        "n_key_value_heads": lambda c: c.num_heads // 2,
        "ungroup_grouped_query_attention": True,
    },
    "split-inputs": {"normalization_type": "LN", "use_split_qkv_input": True, "use_hook_mlp_in": True},
    "sandwich": {"normalization_type": "RMS", "use_normalization_before_and_after": True},
    "experts": {
        "normalization_type": "RMS",
        "num_experts": 4,
        "experts_per_token": 2,
        "gated_mlp": True,
        "act_fn": "silu",
    },
    "soft-capped": {"normalization_type": "RMS", "attn_scores_soft_cap": 5.0, "output_logits_soft_cap": 3.0},
}
_DOMAIN = {"d_model": (16, 32), "num_heads": (2, 4), "max_len": (40,)}
SHIPPED = {
    name: Subject(
        kind="decoder",
        name=f"transformer-lens HookedTransformer ({name})",
        build=partial(build, **options),
        forward=forward,
        mask_forms=("padding",),
        cache=cached,
        domain=_DOMAIN,
        declares=_FACTS.get(name, {}),
    )
    for name, options in _SHAPES.items()
}
SHIPPED["bidirectional"] = Subject(
    kind="encoder",
    name="transformer-lens HookedTransformer (bidirectional)",
    build=partial(build, attention_dir="bidirectional", normalization_type="LN"),
    forward=forward,
    mask_forms=("padding",),
    domain=_DOMAIN,
    declares={"causal": False},
)
