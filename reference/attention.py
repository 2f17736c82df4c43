"""Scaled dot-product attention and multi-head attention (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.reference.cache import LayerCache
from veriformer.reference.position_bias import NoBias
from veriformer.reference.rotary import NoRotation


def softmax(scores: Tensor, dim: int = -1) -> Tensor:
    """Return exp(x_i - max x) / sum_j exp(x_j - max x); a slice that is -inf throughout gives zeros.

    Args:
        scores: `[..., S]`, floating point; -inf marks what must get no weight.
        dim: axis that sums to one.

    Returns:
        Weights of the same shape and dtype.

    Source: subtracting the maximum changes nothing and prevents overflow (Milakov & Gimelshein 2018, section 2).

    >>> softmax(torch.tensor([0.0, 0.0, float("-inf")])).tolist()
    [0.5, 0.5, 0.0]
    """
    largest = scores.amax(dim=dim, keepdim=True).detach().clamp(min=torch.finfo(scores.dtype).min)
    shifted = (scores - largest).exp()
    return shifted / shifted.sum(dim=dim, keepdim=True).clamp(min=1)  # the largest adds exp(0): 0 is a sum without any


def causal_allowed(query_len: int, key_len: int, device: torch.device | None = None) -> Tensor:
    """Return `[T, S]` bool: query t may attend to key s; the last query sees all keys (bottom-right alignment).

    >>> causal_allowed(2, 3).tolist()
    [[True, True, False], [True, True, True]]
    """
    every = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
    return every.tril(diagonal=key_len - query_len)


def window_allowed(query_len: int, key_len: int, window: int, device: torch.device | None = None) -> Tensor:
    """Return `[T, S]` bool: query t sees the keys less than `window` away (bottom-right alignment).

    >>> window_allowed(2, 3, 1).tolist()
    [[False, True, False], [False, False, True]]
    """
    every = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
    own = key_len - query_len
    return every.tril(diagonal=own + window - 1).triu(diagonal=own - window + 1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T * scale + bias, masked) v and the weights.

    Args:
        query: `[B, H, T, K]`.
        key: `[B, G, S, K]`, G dividing H: head h uses key-value head h // (H / G).
        value: `[B, G, S, E]`.
        attention_mask: bool, broadcastable to `[B, H, T, S]`, True = may attend; or float, added to the scores.
        causal: whether query t sees keys up to t + S - T alone.
        window: keys that a query sees to either side, its own among them; None: all.
        scale: factor on q k^T; None: 1 / sqrt(K).
        bias: added to the scores, broadcastable to `[B, H, T, S]`.
        dropout: applied to the weights.

    Returns:
        Output `[B, H, T, E]` and weights `[B, H, T, S]` (before dropout). A row that may attend nowhere is zero.

    Source: Vaswani et al. 2017, equation 1.

    >>> q = torch.zeros(1, 1, 1, 4)
    >>> k, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> attention(q, k, v)[0].item()
    2.0
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = torch.where(attention_mask, scores, -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    if causal:
        allowed = causal_allowed(query.shape[-2], key.shape[-2], scores.device)
        scores = torch.where(allowed, scores, -torch.inf)
    if window is not None:
        near = window_allowed(query.shape[-2], key.shape[-2], window, scores.device)
        scores = torch.where(near, scores, -torch.inf)
    weights = softmax(scores)
    return (weights if dropout is None else dropout(weights)) @ value, weights


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_H) W_O with head_i = attention(x W_Q_i, y W_K_i, y W_V_i).

    Source: Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        d_head: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        rotary: nn.Module | None = None,
        position_bias: nn.Module | None = None,
        causal: bool = False,
        window: int | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.d_head = d_model // num_heads if d_head is None else d_head
        self.scale, self.causal, self.window = scale, causal, window
        self.q_proj = nn.Linear(d_model, num_heads * self.d_head, bias=bias)
        self.k_proj = nn.Linear(d_model, self.num_key_value_heads * self.d_head, bias=bias)
        self.v_proj = nn.Linear(d_model, self.num_key_value_heads * self.d_head, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.d_head, d_model, bias=bias)
        self.query_norm = nn.Identity() if head_norm is None else head_norm(self.d_head)
        self.key_norm = nn.Identity() if head_norm is None else head_norm(self.d_head)
        self.rotary = NoRotation() if rotary is None else rotary
        self.position_bias = NoBias() if position_bias is None else position_bias
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from `x` to `memory` (to `x` itself without one).

        Args:
            x: `[B, T, D]`.
            memory: `[B, S, D]`.
            attention_mask: bool, True = may attend: `[B, S]`, `[T, S]`, `[B, T, S]` or `[B, H, T, S]` (see
                `as_pairwise` for how two axes are told apart).
            positions: `[B, T]` int64, index of each token of `x`; None: 0..T-1.
            cache: keys and values of earlier tokens; those of `x` are appended.

        Returns:
            Output `[B, T, D]` and weights `[B, H, T, S]`.
        """
        source = x if memory is None else memory
        query = self.query_norm(self._split(self.q_proj(x), self.num_heads))
        key = self.key_norm(self._split(self.k_proj(source), self.num_key_value_heads))
        value = self._split(self.v_proj(source), self.num_key_value_heads)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        key_positions = positions
        if cache is not None:
            key, value, key_positions = cache.append(key, value, positions)
        output, weights = attention(
            query,
            key,
            value,
            attention_mask=as_pairwise(attention_mask, len(x), x.shape[1], key.shape[2]),
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            bias=self.position_bias(positions, key_positions),
            dropout=self.dropout,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), weights

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """`[B, T, heads * K]` to `[B, heads, T, K]`."""
        return x.unflatten(-1, (heads, self.d_head)).transpose(1, 2)


def as_pairwise(mask: Tensor | None, batch: int, query_len: int, key_len: int) -> Tensor | None:
    """Bring a mask to a shape that broadcasts to `[B, H, T, S]`.

    Args:
        mask: bool, True = may attend. `[B, S]` is padding and wins where B = T makes the two readings coincide;
            a pairwise mask for such a batch is given as `[1, T, S]`.
        batch: B.
        query_len: T.
        key_len: S.

    Raises:
        ValueError: the shape is none of the allowed ones, or the mask is not bool.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise ValueError(f"attention_mask was {mask.dtype}; it must be bool, True = may attend")
    shape = tuple(mask.shape)
    if shape == (batch, key_len):
        return mask[:, None, None, :]
    if shape == (query_len, key_len):
        return mask[None, None]
    if mask.ndim == 3 and shape[0] in (1, batch) and shape[1:] == (query_len, key_len):
        return mask[:, None]
    if mask.ndim == 4 and shape[-2:] == (query_len, key_len):
        return mask
    raise ValueError(
        f"attention_mask had shape {list(shape)}; for B={batch}, T={query_len}, S={key_len} it must be "
        f"[B, S], [T, S], [B, T, S] or [B, H, T, S]"
    )
