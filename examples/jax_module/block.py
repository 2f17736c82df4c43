"""A decoder block in flax, checked as it is: arrays and gradients cross between the frameworks."""

import functools

import jax
import jax.numpy as jnp
from flax import linen

from veriformer.properties import Subject
from veriformer.properties.adapters.shared.jax_arrays import JaxModule, jitted


class Block(linen.Module):
    num_heads: int
    d_ff: int

    @linen.compact
    def __call__(self, x):
        past = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), dtype=bool))[None, None]
        attention = linen.MultiHeadDotProductAttention(self.num_heads, deterministic=True, dtype=x.dtype)
        x = x + attention(linen.LayerNorm(dtype=x.dtype)(x), mask=past)
        inner = linen.gelu(linen.Dense(self.d_ff, dtype=x.dtype)(linen.LayerNorm(dtype=x.dtype)(x)))
        return x + linen.Dense(x.shape[-1], dtype=x.dtype)(inner)


@functools.partial(jitted, static_argnums=0)
def initial(block, x):
    return block.init(jax.random.key(0), x)


def build(sizes):
    """Return the block in sizes that are checked."""
    block = Block(sizes.num_heads, sizes.d_ff)
    params = initial(block, jnp.zeros((1, 2, sizes.d_model)))
    return JaxModule(params, block.apply)


block = Subject(
    kind="layer",
    name="flax block",
    build=build,
    forward=lambda model, x: model(x),
    declares={"causal": True, "positions": "none", "norm_placement": "pre"},
)
