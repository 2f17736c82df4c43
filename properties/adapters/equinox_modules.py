"""equinox: attention and norms as torch modules through arrays. It works on one sample; vmap adds the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.flax_modules import attend, attend_across
from veriformer.properties.adapters.shared.jax_arrays import JaxModule
from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.subject.subject import Subject


def build_attention(config: Any, **options: Any) -> nn.Module:
    """Return multi-head attention of the drawn sizes; called with x, memory and a mask `[B, 1, T, S]`."""
    import equinox
    import jax

    layer = equinox.nn.MultiheadAttention(config.num_heads, config.d_model, key=jax.random.key(0), **options)
    params, rest = equinox.partition(layer, equinox.is_inexact_array)

    def apply(params: Any, x: Any, memory: Any, mask: Any = None) -> Any:
        whole = equinox.combine(params, rest)
        if mask is None:
            return jax.vmap(lambda q, k: whole(q, k, k))(x, memory)
        return jax.vmap(lambda q, k, m: whole(q, k, k, mask=m))(x, memory, mask[:, 0])

    return JaxModule(params, apply)


def build_norm(config: Any, name: str) -> nn.Module:
    """Return a norm of the drawn width."""
    import equinox
    import jax

    params, rest = equinox.partition(getattr(equinox.nn, name)(config.d_model), equinox.is_inexact_array)
    return JaxModule(params, lambda params, x: jax.vmap(jax.vmap(equinox.combine(params, rest)))(x))


def build_rotary(config: Any, theta: float, beside: float | None = None) -> nn.Module:
    """Return rotary positions of the drawn head width.

    Args:
        config: sizes.
        theta: base of the wavelengths.
        beside: base of other rotary positions of the same width that were called before, as in a model that has two.
    """
    import equinox
    import jax

    rotary = equinox.nn.RotaryPositionalEmbedding(config.d_head, theta)
    other = None if beside is None else equinox.nn.RotaryPositionalEmbedding(config.d_head, beside)

    def apply(params: Any, rows: Any) -> Any:
        if other is not None:
            jax.vmap(other)(rows)
        return jax.vmap(rotary)(rows)

    return JaxModule({}, apply)


def rotate(model: Any, x: Any, positions: Any) -> Any:
    """Rotate x `[B, H, T, K]` at positions `[T]`; it counts positions itself, so that x is laid out among zeros."""
    again = (positions[:, None] == positions).tril(-1).sum(dim=1)  # what stands at one position gets rows of its own
    rows = x.new_zeros(int(again.max()) + 1, x.shape[0] * x.shape[1], int(positions.max()) + 1, x.shape[-1])
    rows[again, :, positions] = x.flatten(0, 1).transpose(0, 1)
    turned = model(rows.flatten(0, 1)).reshape(rows.shape)
    return turned[again, :, positions].transpose(0, 1).unflatten(0, x.shape[:2])


SHIPPED = {
    "attention": Subject(
        kind="self_attention",
        name="equinox MultiheadAttention",
        build=build_attention,
        forward=attend,
        mask_forms=("padding", "pairwise"),
        declares={"causal": False, "positions": "none", "bias": False},
    ),
    "attention-bias": Subject(
        kind="self_attention",
        name="equinox MultiheadAttention (biases)",
        forward=attend,
        build=partial(
            build_attention, use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True
        ),
        mask_forms=("padding", "pairwise"),
        declares={"causal": False, "positions": "none", "bias": True},
    ),
    "attention-causal": Subject(
        kind="self_attention",
        name="equinox MultiheadAttention (causal)",
        build=build_attention,
        forward=partial(attend, causal=True),
        mask_forms=("padding",),
        declares={"causal": True, "positions": "none"},
    ),
    "attention-cross": Subject(
        kind="cross_attention",
        name="equinox MultiheadAttention (cross)",
        build=build_attention,
        forward=attend_across,
    ),
    "rotary": Subject(
        kind="rotary",
        name="equinox RotaryPositionalEmbedding",
        build=partial(build_rotary, theta=10_000.0),
        forward=rotate,
        declares={"layout": "halves"},
    ),
    "rotary-second": Subject(
        kind="rotary",
        name="equinox RotaryPositionalEmbedding (a second base)",
        build=partial(build_rotary, theta=500_000.0, beside=10_000.0),
        forward=rotate,
        declares={"layout": "halves", "base": 500_000},
    ),
    "layer-norm": Subject(
        kind="norm",
        name="equinox LayerNorm",
        build=partial(build_norm, name="LayerNorm"),
        forward=call,
        declares={"norm": "layer"},
    ),
    "rms-norm": Subject(
        kind="norm",
        name="equinox RMSNorm",
        build=partial(build_norm, name="RMSNorm"),
        forward=call,
        declares={"norm": "rms", "norm_bias": True},
    ),
}
