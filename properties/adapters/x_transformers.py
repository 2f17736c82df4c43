"""x-transformers: TransformerWrapper, XTransformer and their options, each of them a subject."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject

DOMAIN = {"d_model": (24, 32), "num_heads": (2, 4), "num_layers": (2,), "max_len": (40,)}


def build(config: Any, causal: bool = True, wrapper: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    """Return a TransformerWrapper of the drawn sizes with options of its layers."""
    import x_transformers

    stack = x_transformers.Decoder if causal else x_transformers.Encoder
    options = {name: value(config) if callable(value) else value for name, value in options.items()}
    return x_transformers.TransformerWrapper(
        num_tokens=config.vocab_size, max_seq_len=config.max_len, emb_dropout=config.dropout, **(wrapper or {}),
        attn_layers=stack(
            dim=config.d_model, depth=config.num_layers, heads=config.num_heads, attn_dim_head=config.d_head,
            attn_dropout=config.dropout, ff_dropout=config.dropout, verbose=False, **options,
        ),
    )  # fmt: skip


def build_pair(config: Any, **options: Any) -> nn.Module:
    """Return an XTransformer of the drawn sizes."""
    import x_transformers

    sizes = {"depth": config.num_layers, "heads": config.num_heads, "attn_dim_head": config.d_head,
             "num_tokens": config.vocab_size, "max_seq_len": config.max_len, "emb_dropout": config.dropout,
             "attn_dropout": config.dropout, "ff_dropout": config.dropout, "verbose": False}  # fmt: skip
    both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return x_transformers.XTransformer(dim=config.d_model, **both, **options)


def forward(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Call a wrapper on tokens `[B, T]`; attention_mask `[B, T]` True = may attend, as its own."""
    return model(tokens, mask=attention_mask, **_begun(attention_mask))


def _begun(attention_mask: Any) -> dict[str, Any]:
    """Say where each sequence begins that is padded on the left, as `generate` does for prompts of several lengths.

    Only where nothing else is hidden: positions inside of a sequence are none that a beginning says.
    """
    if attention_mask is None or not bool((attention_mask[:, 1:] >= attention_mask[:, :-1]).all()):
        return {}
    hidden = (~attention_mask).long().cumprod(-1).sum(-1)
    starts = hidden % attention_mask.shape[1]  # a row that is hidden altogether begins nowhere
    return {"seq_start_pos": starts} if bool(starts.any()) else {}


def forward_pair(model: Any, source: Any, target: Any, source_mask: Any = None) -> Any:
    """Call encoder and decoder on source `[B, S]` and target `[B, T]`; the decoder takes no mask of its own."""
    encoded = model.encoder(source, mask=source_mask, return_embeddings=True)
    return model.decoder.net(target, context=encoded, context_mask=source_mask)


def cached(model: Any, chunks: Any) -> Any:
    """Return the logits `[B, T, V]`: the first chunk at once, then token by token, as its `generate` has it."""
    cache, tokens, outputs = None, None, []
    for step in [chunks[0], *(token for later in chunks[1:] for token in later.split(1, dim=1))]:
        tokens = step if tokens is None else torch.cat([tokens, step], dim=1)
        logits, cache = model(tokens, cache=cache, return_intermediates=True)
        outputs.append(logits[:, -step.shape[1] :])
    return torch.cat(outputs, dim=1)


def can_cache(options: Mapping[str, Any]) -> bool:
    """Whether a model of these options says that its keys can be cached (`can_cache_kv`): its `generate` asks that."""
    wrapper = options.get("wrapper", {})
    return not (options.get("attn_selective") or wrapper.get("num_memory_tokens") or wrapper.get("recycling"))


_NO_TABLE = {"wrapper": {"use_abs_pos_emb": False}}
_DECODERS: Mapping[str, dict[str, Any]] = {
    "absolute": {},
    "sinusoidal": {"wrapper": {"scaled_sinu_pos_emb": True}},
    "rotary": {"rotary_pos_emb": True, **_NO_TABLE},
    "rotary-xpos": {"rotary_xpos": True, **_NO_TABLE},
    "alibi": {"alibi_pos_bias": True, **_NO_TABLE},
    "t5-bias": {"rel_pos_bias": True, **_NO_TABLE},
    "dynamic-bias": {"dynamic_pos_bias": True, **_NO_TABLE},
    "no-positions": dict(_NO_TABLE),
    "polar": {"polar_pos_emb": True, **_NO_TABLE},
    "cope": {"attn_use_cope": True, **_NO_TABLE},
    "rmsnorm": {"use_rmsnorm": True},
    "simple-rmsnorm": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "dynamic-tanh": {"use_dynamic_tanh": True},
    "post-norm": {"pre_norm": False},
    "pre-and-post-norm": {"pre_and_post_norm": True},
    "sandwich-norm": {"sandwich_norm": True},
    "flash": {"attn_flash": True, "rotary_pos_emb": True, **_NO_TABLE},
    "multi-query": {"attn_one_kv_head": True},
    "grouped-query": {"attn_kv_heads": lambda c: 1 if c.num_heads == 2 else 2},
    "query-key-norm": {"attn_qk_norm": True},
    "query-key-rmsnorm": {"attn_qk_rmsnorm": True},
    "talking-heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "head-scale": {"attn_head_scale": True},
    "memory-keys": {"attn_num_mem_kv": 3},
    "head-sink": {"attn_head_learned_sink": True},
    "sigmoid": {"attn_sigmoid": True},
    "softclamp": {"attn_softclamp_logits": True},
    "top-k": {"attn_sparse_topk": 2},
    "value-gate": {"attn_gate_values": True},
    "on-attention": {"attn_on_attn": True},
    "swiglu": {"ff_swish": True, "ff_glu": True},
    "relu-squared": {"ff_relu_squared": True},
    "ff-post-norm": {"ff_post_act_ln": True},
    "no-bias": {"ff_no_bias": True},
    "residual-attention": {"residual_attn": True},
    "gated-residual": {"gate_residual": True},
    "scaled-residual": {"scale_residual": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "shift-tokens": {"shift_tokens": 1},
    "layerscale": {"use_layerscale": True},
    "value-residual": {"add_value_residual": True},
    "window": {"attn_max_attend_past": 3, "rotary_pos_emb": True, **_NO_TABLE},
    "tied": {"wrapper": {"tie_embedding": True}},
    "l2norm-embedding": {"wrapper": {"l2norm_embed": True}},
    "memory-tokens": {"wrapper": {"num_memory_tokens": 2}},
    "selective": {"attn_selective": True},
    "forgetting": {"attn_data_dependent_alibi": True, **_NO_TABLE},
    "hyper-connections": {"num_residual_streams": 2},
    "window-flash": {"attn_max_attend_past": 3, "attn_flash": True, "rotary_pos_emb": True, **_NO_TABLE},
    "alibi-flash": {"alibi_pos_bias": True, "attn_flash": True, **_NO_TABLE},
    "alibi-memory-keys": {"alibi_pos_bias": True, "attn_num_mem_kv": 3, **_NO_TABLE},
    "alibi-rotary": {"alibi_pos_bias": True, "rotary_pos_emb": True, **_NO_TABLE},
    "forgetting-memory-keys": {"attn_data_dependent_alibi": True, "attn_num_mem_kv": 3, **_NO_TABLE},
    "forgetting-per-row": {"attn_data_dependent_alibi": True, "attn_data_dependent_alibi_per_row": True, **_NO_TABLE},
    "latent-keys": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    "latent-value-residual": {"add_value_residual": True, "attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    "orthogonal-values": {"attn_orthog_projected_values": True},
    "l2-distance": {"attn_l2_distance": True},
    "unet-skips": {"unet_skips": True},
    "zero-key": {"attn_add_zero_kv": True},
    "interspersed-memory": {"wrapper": {"num_memory_tokens": 2, "memory_tokens_interspersed_every": 4}},
}  # fmt: skip
_ENCODERS: Mapping[str, dict[str, Any]] = {
    "absolute": {},
    "rotary": {"rotary_pos_emb": True, **_NO_TABLE},
    "alibi": {"alibi_pos_bias": True, **_NO_TABLE},
    "t5-bias": {"rel_pos_bias": True, **_NO_TABLE},
    "no-positions": dict(_NO_TABLE),
    "flash": {"attn_flash": True},
    "post-norm": {"pre_norm": False},
    "rmsnorm": {"use_rmsnorm": True},
    "shift-tokens": {"shift_tokens": 1},
    "window": {"attn_max_attend_past": 3},
    "memory-keys-flash": {"attn_num_mem_kv": 3, "attn_flash": True},
    "query-key-norm": {"attn_qk_norm": True},
}
_DECLARED: Mapping[str, dict[str, Any]] = {
    "decoder-no-positions": {"positions": "none"},
    "encoder-no-positions": {"positions": "none"},
    "decoder-window": {"window": 4},  # max_attend_past=3: three tokens and itself
    "decoder-window-flash": {"window": 4},
    "encoder-window": {"sparse": True},  # of the past alone: what comes later is all seen
    "decoder-head-sink": {"sink": True},
    "decoder-top-k": {"sparse": True, "min_length": 2},  # it asks for k keys, and raises on fewer (its page)
    "decoder-macaron": {"structure": "other"},  # its feed-forward networks are added by half (`Scale(0.5, layer)`)
    "decoder-pre-and-post-norm": {"norm": "other"},  # a norm behind each sublayer and another before the next one
    "decoder-tied": {"structure": "other"},  # tied logits are multiplied by `tie_embedding_scale`, 1/sqrt(dim)
}
"""Documented behaviour, by subject; what is not here is probed."""


def _decoder(name: str, options: dict[str, Any]) -> Subject:
    return Subject(
        kind="decoder", name=f"x-transformers decoder ({name})", build=partial(build, **options), forward=forward,
        mask_forms=("padding",), domain=DOMAIN, cache=cached if can_cache(options) else None,
        declares=_DECLARED.get(f"decoder-{name}", {}),
    )  # fmt: skip


def _encoder(name: str, options: dict[str, Any]) -> Subject:
    return Subject(
        kind="encoder", name=f"x-transformers encoder ({name})", build=partial(build, causal=False, **options),
        forward=forward, mask_forms=("padding",), domain=DOMAIN,
        declares={"causal": False, **_DECLARED.get(f"encoder-{name}", {})},
    )  # fmt: skip


def _pair(name: str, options: dict[str, Any]) -> Subject:
    return Subject(
        kind="encoder_decoder", name=f"x-transformers encoder-decoder ({name})", build=partial(build_pair, **options),
        forward=forward_pair, domain=DOMAIN, declares={"causal": True},
    )  # fmt: skip


SHIPPED = {
    **{f"decoder-{name}": _decoder(name, options) for name, options in _DECODERS.items()},
    **{f"encoder-{name}": _encoder(name, options) for name, options in _ENCODERS.items()},
    "encoder-decoder": _pair("absolute", {}),
    "encoder-decoder-tied": _pair("tied", {"tie_token_emb": True}),
}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise instances of TransformerWrapper."""
    if not type(thing).__module__.startswith("x_transformers.") or not hasattr(thing, "attn_layers"):
        return None
    layers = thing.attn_layers
    sizes = DrawnConfig(d_model=layers.dim, num_heads=1, num_key_value_heads=1, num_layers=layers.depth,
                        vocab_size=thing.num_tokens, max_len=thing.max_seq_len)  # fmt: skip
    chosen = kind or ("decoder" if layers.causal else "encoder")
    return Subject(kind=chosen, name=type(thing).__name__, module=thing, config=sizes, forward=forward,
                   mask_forms=("padding",), declares={"causal": bool(layers.causal)})  # fmt: skip
