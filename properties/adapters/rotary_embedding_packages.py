"""rotary-embedding-torch: rotary positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.subject.subject import Subject


def build_rotary(config: Any, **options: Any) -> nn.Module:
    """Return the rotary embedding for the drawn head width."""
    from rotary_embedding_torch import RotaryEmbedding

    return RotaryEmbedding(dim=config.d_head, cache_if_possible=False, **options)


def rotate(model: Any, x: Any, positions: Any) -> Any:
    """Rotate x `[B, H, T, K]` at positions `[T]`."""
    from rotary_embedding_torch import apply_rotary_emb

    return apply_rotary_emb(model(positions.to(model.freqs.dtype)), x)


# a head of two channels is left out: RotaryEmbedding(dim=2) divides by dim - 2
SHIPPED = {
    "rotary": Subject(kind="rotary", name="rotary-embedding-torch RotaryEmbedding", build=build_rotary, forward=rotate,
                      domain={"d_model": (8, 16), "num_heads": (2, 1)}, declares={"layout": "interleaved"}),
    "rotary-theta": Subject(kind="rotary", name="rotary-embedding-torch RotaryEmbedding (theta)",
                            build=partial(build_rotary, theta=500_000), forward=rotate,
                            domain={"d_model": (8, 16), "num_heads": (2, 1)},
                            declares={"layout": "interleaved", "base": 500_000}),
}  # fmt: skip
