"""Layers: attention and feed-forward networks, each wrapped in a norm, a dropout and a skip connection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.reference.attention import MultiHeadAttention
from veriformer.reference.cache import LayerCache
from veriformer.reference.config import PLACEMENTS, Config
from veriformer.reference.feedforward import FEED_FORWARDS
from veriformer.reference.normalization import NORMS


class Skip(nn.Module):
    """The residual connection: x + f(x)."""

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        """Return the sum."""
        return x + change


class NoSkip(nn.Module):
    """The residual connection removed: f(x) alone."""

    def forward(self, x: Tensor, change: Tensor) -> Tensor:
        """Return `change`."""
        return change


class DropPath(nn.Module):
    """Drop a sample's change with probability `rate`, scale the rest by 1 / (1 - rate) (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, change: Tensor) -> Tensor:
        """Drop in train mode, `[B, T, D]`; the identity in eval mode."""
        if not self.training or self.rate == 0:
            return change
        shape = (len(change), *(1,) * (change.ndim - 1))
        kept = torch.rand(shape, device=change.device) >= self.rate
        return change * kept.to(change.dtype) / (1 - self.rate)


class Sublayer(nn.Module):
    """What surrounds attention and feed-forward networks: pre-LN x + f(norm(x)), post-LN norm(x + f(x)).

    Three norms, some of them the identity; which ones is all that tells pre-LN from post-LN (Xiong et al. 2020, figure
    1) and both from norms on what the sublayer gives: x + norm(f(norm(x))), x + norm(f(x)).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_in, self.norm_change, self.norm_out = (
            NORMS[config.norm if place in PLACEMENTS[config.norm_placement] else "none"](
                config.d_model, config.norm_eps
            )
            for place in ("in", "change", "out")
        )
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(config.drop_path) if config.drop_path else nn.Identity()
        self.skip = Skip() if config.residual else NoSkip()

    def enter(self, x: Tensor) -> Tensor:
        """Return what the sublayer gets, `[B, T, D]`."""
        return self.norm_in(x)

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Return what follows from the stream `x` and the sublayer's output `change`, `[B, T, D]`."""
        return self.norm_out(self.skip(x, self.drop_path(self.dropout(self.norm_change(change)))))


def make_attention(
    config: Config,
    *,
    causal: bool,
    rotary: nn.Module | None,
    position_bias: nn.Module | None,
    is_over_itself: bool = True,
) -> MultiHeadAttention:
    """Return multi-head attention with the sizes and choices of a configuration; a memory has no window."""
    return MultiHeadAttention(
        config.d_model,
        config.num_heads,
        num_key_value_heads=config.key_value_heads,
        d_head=config.head_width,
        bias=config.bias,
        scale=config.attention_scale,
        dropout=config.dropout if config.attention_dropout is None else config.attention_dropout,
        rotary=rotary,
        position_bias=position_bias,
        causal=causal,
        window=config.window if is_over_itself else None,
        head_norm=(lambda width: NORMS[config.norm](width, config.norm_eps)) if config.query_key_norm else None,
    )


def make_feed_forward(config: Config) -> nn.Module:
    """Return the feed-forward network of a configuration."""
    dropout = config.dropout if config.ffn_dropout is None else config.ffn_dropout
    return FEED_FORWARDS[config.activation](config.d_model, config.inner_width, bias=config.bias, dropout=dropout)


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network. With `causal`, the layer of a decoder-only model."""

    def __init__(
        self,
        config: Config,
        *,
        causal: bool = False,
        rotary: nn.Module | None = None,
        position_bias: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention = make_attention(config, causal=causal, rotary=rotary, position_bias=position_bias)
        self.feed_forward = make_feed_forward(config)
        self.around_attention, self.around_feed_forward = Sublayer(config), Sublayer(config)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream after the layer `[B, T, D]` and the attention weights `[B, H, T, S]`.

        Args:
            x: `[B, T, D]`.
            attention_mask: bool, True = may attend; see `MultiHeadAttention.forward`.
            positions: `[B, T]`.
            cache: of earlier tokens.
        """
        attended, weights = self.attention(
            self.around_attention.enter(x), attention_mask=attention_mask, positions=positions, cache=cache
        )
        x = self.around_attention.leave(x, attended)
        x = self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))
        return x, weights


class ParallelLayer(EncoderLayer):
    """Self-attention and feed-forward network side by side: x + f(norm(x)) + g(norm(x)) (Wang & Komatsuzaki 2021)."""

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return what `EncoderLayer.forward` does, with one stream for both sublayers."""
        attended, weights = self.attention(
            self.around_attention.enter(x), attention_mask=attention_mask, positions=positions, cache=cache
        )
        changed = self.feed_forward(self.around_feed_forward.enter(x))
        return self.around_feed_forward.leave(self.around_attention.leave(x, attended), changed), weights


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the memory, then a feed-forward network."""

    def __init__(
        self, config: Config, *, rotary: nn.Module | None = None, position_bias: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention = make_attention(config, causal=True, rotary=rotary, position_bias=position_bias)
        self.cross_attention = make_attention(
            config, causal=False, rotary=None, position_bias=None, is_over_itself=False
        )
        self.feed_forward = make_feed_forward(config)
        self.around_attention, self.around_cross_attention = Sublayer(config), Sublayer(config)
        self.around_feed_forward = Sublayer(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream after the layer `[B, T, D]` and the weights on the memory `[B, H, T, S]`.

        Args:
            x: `[B, T, D]`.
            memory: `[B, S, D]`.
            attention_mask: of the target, `[B, T]` bool, True = may attend.
            memory_mask: of the memory, `[B, S]` bool, True = may attend.
            positions: `[B, T]`.
            cache: of earlier target tokens.
        """
        attended, _ = self.attention(
            self.around_attention.enter(x), attention_mask=attention_mask, positions=positions, cache=cache
        )
        x = self.around_attention.leave(x, attended)
        attended, weights = self.cross_attention(
            self.around_cross_attention.enter(x), memory, attention_mask=memory_mask
        )
        x = self.around_cross_attention.leave(x, attended)
        x = self.around_feed_forward.leave(x, self.feed_forward(self.around_feed_forward.enter(x)))
        return x, weights
