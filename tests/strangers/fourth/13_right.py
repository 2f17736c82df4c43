"""Whisper with tokens where the sound would be."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def sinusoids(length, channels, max_timescale=10000):
    """Returns sinusoids for positional embedding: sines first, then cosines."""
    assert channels % 2 == 0
    step = torch.log(torch.tensor(float(max_timescale), dtype=torch.float64)) / max(channels // 2 - 1, 1)
    inv_timescales = torch.exp(-step * torch.arange(channels // 2, dtype=torch.float64))
    scaled_time = torch.arange(length, dtype=torch.float64)[:, None] * inv_timescales[None, :]
    return torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=1)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Optional[Tensor] = None, mask: Optional[Tensor] = None):
        q = self.query(x)
        k = self.key(x if xa is None else xa)
        v = self.value(x if xa is None else xa)
        return self.out(self.qkv_attention(q, k, v, mask))

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None):
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk.masked_fill(~mask, torch.finfo(qk.dtype).min)
        w = F.softmax(qk if qk.dtype == torch.float64 else qk.float(), dim=-1).to(v.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, n_mlp: int, cross_attention: bool = False):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = LayerNorm(n_state)

    def forward(self, x, xa=None, mask=None, xa_mask=None):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, mask=xa_mask)
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self, n_vocab: int, n_ctx: int, n_state: int, n_head: int, n_mlp: int, n_layer: int):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.n_ctx, self.n_state = n_ctx, n_state
        self.blocks = nn.ModuleList([ResidualAttentionBlock(n_state, n_head, n_mlp) for _ in range(n_layer)])
        self.ln_post = LayerNorm(n_state)

    def forward(self, tokens: Tensor, mask: Optional[Tensor]):
        if tokens.shape[1] > self.n_ctx:
            raise ValueError(f"source of {tokens.shape[1]}, at most {self.n_ctx}")
        x = self.token_embedding(tokens)
        x = x + sinusoids(tokens.shape[1], self.n_state).to(x)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self, n_vocab: int, n_ctx: int, n_state: int, n_head: int, n_mlp: int, n_layer: int):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(torch.empty(n_ctx, n_state))
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        self.blocks = nn.ModuleList(
            [ResidualAttentionBlock(n_state, n_head, n_mlp, cross_attention=True) for _ in range(n_layer)]
        )
        self.ln = LayerNorm(n_state)

    def forward(self, x: Tensor, xa: Tensor, mask: Optional[Tensor], xa_mask: Optional[Tensor]):
        n = x.shape[1]
        if n > self.positional_embedding.shape[0]:
            raise ValueError(f"target of {n}, at most {self.positional_embedding.shape[0]}")
        causal = torch.ones(1, 1, n, n, dtype=torch.bool, device=x.device).tril()
        mask = causal if mask is None else causal & mask
        x = self.token_embedding(x) + self.positional_embedding[:n]
        for block in self.blocks:
            x = block(x, xa, mask=mask, xa_mask=xa_mask)
        return self.ln(x) @ self.token_embedding.weight.T


class Whisper(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_state, n_head, n_mlp, n_layer):
        super().__init__()
        self.encoder = AudioEncoder(n_vocab, n_ctx, n_state, n_head, n_mlp, n_layer)
        self.decoder = TextDecoder(n_vocab, n_ctx, n_state, n_head, n_mlp, n_layer)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = None if source_mask is None else source_mask[:, None, None, :]
        target_mask = None if target_mask is None else target_mask[:, None, None, :]
        return self.decoder(target, self.encoder(source, source_mask), target_mask, source_mask)


subject = Subject(
    kind="encoder_decoder",
    name="Whisper",
    build=lambda c: Whisper(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "causal": True,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "embedding_scale": False,
        "init": "other",
        "structure": "other",
        "padding_side": "right",
        "beyond_max_len": "error",
        "memory": "quadratic",
    },
)
