"""Sequence to sequence in fairseq's style: heads are folded into the batch, products by baddbmm with the mask as its input."""
import torch
from torch import nn

from veriformer.properties import Subject


class FoldedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.kv_proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def fold(self, x):
        b, t, d = x.shape
        return x.reshape(b, t, self.heads, d // self.heads).transpose(1, 2).reshape(b * self.heads, t, -1)

    def forward(self, query, memory, visible):
        """visible [B, T, S]"""
        b, t, d = query.shape
        q = self.fold(self.q_proj(query))
        k, v = map(self.fold, self.kv_proj(memory).chunk(2, -1))
        bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min / 2)
        bias = bias.repeat_interleave(self.heads, 0)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
        y = torch.bmm(scores.softmax(-1), v)
        return self.out_proj(y.view(b, self.heads, t, -1).transpose(1, 2).reshape(b, t, d))


class Half(nn.Module):
    def __init__(self, dim, heads, inner, crosses):
        super().__init__()
        self.self_attn = FoldedAttention(dim, heads)
        self.cross_attn = FoldedAttention(dim, heads) if crosses else None
        self.ffn = nn.Sequential(nn.Linear(dim, inner), nn.ReLU(), nn.Linear(inner, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 if crosses else 2))

    def forward(self, x, visible, memory=None, memory_visible=None):
        x = self.norms[0](x + self.self_attn(x, x, visible))
        if self.cross_attn is not None:
            x = self.norms[1](x + self.cross_attn(x, memory, memory_visible))
        return self.norms[-1](x + self.ffn(x))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.src_pos, self.tgt_pos = nn.Embedding(c.max_len, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList(Half(c.d_model, c.num_heads, c.d_ff, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Half(c.d_model, c.num_heads, c.d_ff, True) for _ in range(c.num_layers))
        self.generator = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        (b, s), t = source.shape, target.shape[1]
        src = source.new_ones(b, s, dtype=torch.bool) if source_mask is None else source_mask
        tgt = target.new_ones(b, t, dtype=torch.bool) if target_mask is None else target_mask
        memory = self.src_embed(source) + self.src_pos.weight[:s]
        for layer in self.encoder:
            memory = layer(memory, src[:, None, :].expand(b, s, s))
        x = self.tgt_embed(target) + self.tgt_pos.weight[:t]
        past = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        for layer in self.decoder:
            x = layer(x, past & tgt[:, None, :], memory, src[:, None, :].expand(b, t, s))
        return self.generator(x)


subject = Subject(
    kind="encoder_decoder",
    name="folded heads",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "learned", "norm_placement": "post", "padding_side": "right"},
)
