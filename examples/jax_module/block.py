"""A decoder block in flax, checked as it is: arrays and gradients cross between the frameworks."""

import jax
import jax.numpy as jnp
from flax import linen

from veriformer.properties import DrawnConfig, Subject
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


SIZES = DrawnConfig(d_model=8, num_heads=2, d_ff=12, max_len=8)
made = Block(SIZES.num_heads, SIZES.d_ff)
params = jitted(made.init)(jax.random.key(0), jnp.zeros((1, 2, SIZES.d_model)))

block = Subject(
    kind="layer",
    name="flax block",
    module=JaxModule(params, made.apply),
    config=SIZES,  # one model, tiny: JAX compiles anew for every shape
    forward=lambda model, x: model(x),
    declares={"causal": True, "positions": "none", "norm_placement": "pre"},
)
