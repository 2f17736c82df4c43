"""flax: attention, norms and stacks of both its interfaces, linen and nnx, as torch modules through arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.jax_arrays import JaxModule, jitted
from veriformer.properties.adapters.shared.plain_calls import call, causal_mask
from veriformer.properties.adapters.shared.token_tables import OnTokens
from veriformer.properties.subject.subject import Subject


def build_linen_attention(config: Any, **options: Any) -> JaxModule:
    """Return linen's multi-head attention; called with x and a mask `[B, 1, T, S]`."""
    import jax.numpy as jnp
    from flax import linen

    layer = linen.MultiHeadDotProductAttention(
        num_heads=config.num_heads, qkv_features=config.d_model, deterministic=True, **options
    )
    start = jnp.zeros((1, 2, config.d_model))
    params = _initial(layer, start, start)

    def apply(params: Any, x: Any, memory: Any, mask: Any = None) -> Any:
        return _typed(layer, x).apply(params, x, memory, mask=mask)

    return JaxModule(params, apply)


def _initial(layer: Any, *inputs: Any) -> Any:
    """Return the parameters of a linen module; layers of the same sizes share what is compiled for that."""
    import jax

    return _initialising()(layer, jax.random.key(0), *inputs)


@cache
def _initialising() -> Any:
    return jitted(lambda layer, key, *inputs: layer.init(key, *inputs), static_argnums=0)


def _typed(layer: Any, x: Any) -> Any:
    return layer.clone(dtype=x.dtype)


@cache
def _linen_block() -> Any:
    """Return the class of `build_linen_block`, made once, so that blocks of the same sizes are equal."""
    import jax.numpy as jnp
    from flax import linen

    class Block(linen.Module):  # type: ignore[misc]
        num_heads: int
        d_ff: int
        causal: bool

        @linen.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any, mask: Any = None) -> Any:
            attention = linen.MultiHeadDotProductAttention(self.num_heads, deterministic=True, dtype=x.dtype)
            if self.causal:
                past = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))[None, None]
                mask = past if mask is None else mask & past
            x = x + attention(linen.LayerNorm(dtype=x.dtype)(x), mask=mask)
            inner = linen.gelu(linen.Dense(self.d_ff, dtype=x.dtype)(linen.LayerNorm(dtype=x.dtype)(x)))
            return x + linen.Dense(x.shape[-1], dtype=x.dtype)(inner)

    return Block


def build_linen_block(config: Any, causal: bool = False) -> nn.Module:
    """Return a pre-LN block of linen's layers, as flax's own examples write it."""
    import jax.numpy as jnp

    block = _linen_block()(config.num_heads, config.d_ff, causal)
    params = _initial(block, jnp.zeros((1, 2, config.d_model)))
    return JaxModule(params, lambda params, x, mask=None: block.apply(params, x, mask))


class Decoder(OnTokens):
    """Attention on a table of tokens; `decode` gives the same through its cache, token by token."""

    decode: Callable[..., Any]


def build_linen_decoder(config: Any) -> nn.Module:
    """Return linen's attention on a table of tokens, causal, with its cache beside it (`decode=True`)."""
    import jax
    import jax.numpy as jnp
    from flax import linen

    attention = build_linen_attention(config)
    keeping = linen.MultiHeadDotProductAttention(
        num_heads=config.num_heads, qkv_features=config.d_model, deterministic=True, decode=True
    )

    def decode(params: Any, x: Any) -> Any:
        layer = _typed(keeping, x)
        room = jnp.zeros((x.shape[0], x.shape[1] + 3, x.shape[2]), x.dtype)
        cache = layer.init(jax.random.key(0), room)["cache"]

        def step(cache: Any, token: Any) -> Any:
            output, kept = layer.apply({**params, "cache": cache}, token[:, None], mutable=["cache"])
            return kept["cache"], output[:, 0]

        return jax.lax.scan(step, cache, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    model = Decoder(config, attention)
    model.decode = attention.beside(decode)
    return model


def run_on_tokens(model: Any, tokens: Any, attention_mask: Any = None) -> Any:
    """Attend causally from the embeddings of tokens `[B, T]`."""
    return attend(model.part, model.table(tokens), attention_mask, causal=True)


def cached(model: Any, chunks: Any) -> Any:
    """Return the outputs `[B, T, D]` token by token, which is all that the cache takes."""
    return model.decode(model.table(torch.cat(chunks, dim=1)))


def build_linen_norm(config: Any, name: str) -> nn.Module:
    """Return a norm of linen."""
    import jax.numpy as jnp
    from flax import linen

    layer = getattr(linen, name)()
    params = _initial(layer, jnp.zeros((1, 2, config.d_model)))
    return JaxModule(params, lambda params, x: _typed(layer, x).apply(params, x))


def build_nnx_attention(config: Any, grouped: bool = False, is_causal: bool = False, **options: Any) -> nn.Module:
    """Return nnx's multi-head attention; `is_causal`: causal by its own flag."""
    from flax import nnx

    if grouped:
        options["num_kv_heads"] = config.num_key_value_heads

    layer = nnx.MultiHeadAttention(
        num_heads=config.num_heads,
        in_features=config.d_model,
        decode=False,
        deterministic=True,
        rngs=nnx.Rngs(0),
        **options,
    )
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def apply(params: Any, x: Any, memory: Any, mask: Any = None) -> Any:
        return nnx.merge(graph, params, rest)(x, memory, mask=mask, is_causal=is_causal)

    return JaxModule(params, apply)


def build_nnx_norm(config: Any, name: str) -> nn.Module:
    """Return a norm of nnx."""
    from flax import nnx

    graph, params, rest = nnx.split(getattr(nnx, name)(config.d_model, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return JaxModule(params, lambda params, x: nnx.merge(graph, params, rest)(x))


def attend(model: Any, x: Any, attention_mask: Any = None, causal: bool = False) -> Any:
    """Attend from x `[B, T, D]` to itself; attention_mask True = may attend, `[B, T]` or pairwise."""
    mask = _pairs(x, attention_mask, causal)
    return model(x, x) if mask is None else model(x, x, mask)


def attend_across(model: Any, x: Any, memory: Any, memory_mask: Any = None) -> Any:
    """Attend from x `[B, T, D]` to memory `[B, S, D]`."""
    if memory_mask is None:
        return model(x, memory)
    return model(x, memory, memory_mask[:, None, None, :].expand(-1, 1, x.shape[1], -1))


def call_block(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call a block on x `[B, T, D]`."""
    mask = _pairs(x, attention_mask, causal=False)
    return model(x) if mask is None else model(x, mask)


def _pairs(x: Any, attention_mask: Any, causal: bool) -> Any:
    """Return a mask `[B, 1, T, T]`, True = may attend, or None."""
    length = x.shape[1]
    mask = causal_mask(length, x.device)[None, None].expand(x.shape[0], 1, -1, -1) if causal else None
    if attention_mask is not None:
        padding = attention_mask.shape == x.shape[:2]
        given = attention_mask[:, None, None, :] if padding else attention_mask.expand(len(x), -1, -1)[:, None]
        given = given.expand(len(x), 1, length, length)
        mask = given if mask is None else mask & given
    return mask


def _attention(label: str, build: Any, causal: bool = False, **facts: Any) -> Subject:
    return Subject(
        kind="self_attention",
        name=f"flax {label}",
        build=build,
        forward=partial(attend, causal=causal),
        mask_forms=("padding", "pairwise"),
        declares={"causal": causal, "positions": "none", **facts},
    )


SHIPPED = {
    "linen-attention": _attention("linen.MultiHeadDotProductAttention", build_linen_attention),
    "linen-attention-causal": _attention(
        "linen.MultiHeadDotProductAttention (causal)", build_linen_attention, causal=True
    ),
    "linen-attention-qk-norm": _attention(
        "linen.MultiHeadDotProductAttention (normalize_qk)",
        partial(build_linen_attention, normalize_qk=True),
        query_key_norm=True,
    ),
    "linen-attention-cross": Subject(
        kind="cross_attention",
        name="flax linen.MultiHeadDotProductAttention (cross)",
        build=build_linen_attention,
        forward=attend_across,
    ),
    "linen-block": Subject(
        kind="layer",
        name="flax linen block",
        build=build_linen_block,
        forward=call_block,
        mask_forms=("padding",),
        declares={"causal": False, "positions": "none"},
    ),
    "linen-block-causal": Subject(
        kind="layer",
        name="flax linen block (causal)",
        build=partial(build_linen_block, causal=True),
        forward=call_block,
        mask_forms=("padding",),
        declares={"causal": True, "positions": "none"},
    ),
    "linen-layer-norm": Subject(
        kind="norm",
        name="flax linen.LayerNorm",
        build=partial(build_linen_norm, name="LayerNorm"),
        forward=call,
        declares={"norm": "layer"},
    ),
    "linen-rms-norm": Subject(
        kind="norm",
        name="flax linen.RMSNorm",
        build=partial(build_linen_norm, name="RMSNorm"),
        forward=call,
        declares={"norm": "rms"},
    ),
    "nnx-attention": _attention("nnx.MultiHeadAttention", build_nnx_attention),
    "nnx-attention-causal": _attention("nnx.MultiHeadAttention (causal)", build_nnx_attention, causal=True),
    "nnx-attention-grouped": replace(
        _attention(
            "nnx.MultiHeadAttention (grouped heads, is_causal)",
            partial(build_nnx_attention, grouped=True, is_causal=True),
        ),
        domain={"d_model": (8, 16), "num_heads": (2, 4), "num_key_value_heads": (2,)},
        declares={"causal": True, "positions": "none"},
    ),
    "linen-decoder": Subject(
        kind="decoder",
        name="flax linen.MultiHeadDotProductAttention (decode=True)",
        build=build_linen_decoder,
        forward=run_on_tokens,
        mask_forms=("padding",),
        cache=cached,
        declares={"positions": "none", "stacked": False, "cached_chunks": False},
    ),
    "nnx-attention-qk-norm": _attention(
        "nnx.MultiHeadAttention (normalize_qk)", partial(build_nnx_attention, normalize_qk=True), query_key_norm=True
    ),
    "nnx-layer-norm": Subject(
        kind="norm",
        name="flax nnx.LayerNorm",
        build=partial(build_nnx_norm, name="LayerNorm"),
        forward=call,
        declares={"norm": "layer"},
    ),
    "nnx-rms-norm": Subject(
        kind="norm",
        name="flax nnx.RMSNorm",
        build=partial(build_nnx_norm, name="RMSNorm"),
        forward=call,
        declares={"norm": "rms"},
    ),
}
