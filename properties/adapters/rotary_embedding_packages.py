"""rotary-embedding-torch: rotary positions, and attention written with them as its documentation writes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.adapters.shared.token_tables import OnTokens
from veriformer.properties.subject.subject import Subject


def _rotary(width: int, **options: Any) -> Any:
    from rotary_embedding_torch import RotaryEmbedding

    return RotaryEmbedding(dim=width, **options)


def build_rotary(config: Any, **options: Any) -> nn.Module:
    """Return the rotary embedding for the drawn head width; it keeps the angles that it once computed."""
    made: nn.Module = _rotary(config.d_head, **options)
    return made


def rotate(model: Any, x: Any, positions: Any) -> Any:
    """Rotate x `[B, H, T, K]` at positions `[T]`; where they follow one another, as the package counts them."""
    first = int(positions[0])
    if torch.equal(positions, first + torch.arange(len(positions), device=positions.device)):
        return model.rotate_queries_or_keys(x, offset=first)
    from rotary_embedding_torch import apply_rotary_emb

    return apply_rotary_emb(model(positions.to(model.freqs.dtype)), x)


class Attention(nn.Module):
    """Causal self-attention whose queries and keys are rotated by the package."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.into = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.rotary = _rotary(config.d_head, **options)

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values `[B, H, T, K]`."""
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.into(x).chunk(3, dim=-1)]

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the last positions of the keys."""
        later = key.shape[2] - query.shape[2]
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(later)
        return self.out(functional.scaled_dot_product_attention(query, key, value, visible).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend from x `[B, T, D]` to itself."""
        query, key, value = self.heads(x)
        if self.rotary.use_xpos:
            query, key = self.rotary.rotate_queries_and_keys(query, key)
        else:
            query, key = (self.rotary.rotate_queries_or_keys(part) for part in (query, key))
        return self.mix(query, key, value)


def build_attention(config: Any, **options: Any) -> nn.Module:
    """Return the attention on a table of tokens."""
    return OnTokens(config, Attention(config, **options))


def cached(model: Any, chunks: Any) -> Any:
    """Return the outputs `[B, T, D]` chunk by chunk; keys are kept as they are and rotated with the queries."""
    kept: list[Tensor] = []
    outputs = []
    for chunk in chunks:
        query, *new = model.part.heads(model.table(chunk))
        kept = [torch.cat(pair, dim=2) for pair in zip(kept, new, strict=True)] if kept else new
        query, key = model.part.rotary.rotate_queries_with_cached_keys(query, kept[0])
        outputs.append(model.part.mix(query, key, kept[1]))
    return torch.cat(outputs, dim=1)


def _attention(label: str, positions: str, **options: Any) -> Subject:
    return Subject(
        kind="decoder", name=f"rotary-embedding-torch attention ({label})",
        build=partial(build_attention, **options), forward=call, cache=cached, domain=_DOMAIN,
        declares={"positions": positions, "stacked": False},
    )  # fmt: skip


_DOMAIN = {"d_model": (8, 16), "num_heads": (2, 1)}  # a head of two channels has a page among the findings
SHIPPED = {
    "rotary": Subject(kind="rotary", name="rotary-embedding-torch RotaryEmbedding", build=build_rotary, forward=rotate,
                      domain=_DOMAIN, declares={"layout": "interleaved"}),
    "rotary-theta": Subject(kind="rotary", name="rotary-embedding-torch RotaryEmbedding (theta)",
                            build=partial(build_rotary, theta=500_000), forward=rotate, domain=_DOMAIN,
                            declares={"layout": "interleaved", "base": 500_000}),
    "attention": _attention("rotary", "rotary"),
    "attention-xpos": _attention("xPos", "other", use_xpos=True),
}  # fmt: skip
