"""DeepSeek's multi-head latent attention: a normed latent of keys and values, one shared rotary key; the cache
keeps the latent and absorbs the up-projections."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject

ROPE = 2


def rope(x, start):
    """x [B, T, ..., ROPE], interleaved; ROPE = 2 is one pair, of frequency 1."""
    t = x.shape[1]
    angle = torch.arange(start, start + t, device=x.device, dtype=torch.float64)
    angle = angle.view(1, t, *[1] * (x.dim() - 3))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.stack([x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos], -1)


class MLA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.head = h, d // h
        self.nope = self.head - ROPE
        if self.nope < 1:
            raise ValueError("heads too narrow")
        self.rank = max(3, d // 2)
        self.wq = nn.Linear(d, d, bias=False)
        self.wkv_a = nn.Linear(d, self.rank + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(self.rank, eps=1e-6)
        self.wkv_b = nn.Linear(self.rank, h * (self.nope + self.head), bias=False)
        self.wo = nn.Linear(d, d, bias=False)
        self.scale = self.head**-0.5

    def parts(self, x, start):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.h, self.head)
        q_nope, q_rope = q.split([self.nope, ROPE], -1)
        latent, k_rope = self.wkv_a(x).split([self.rank, ROPE], -1)
        return q_nope, rope(q_rope, start), self.kv_norm(latent), rope(k_rope, start)

    def forward(self, x, see):
        q_nope, q_rope, latent, k_rope = self.parts(x, 0)
        b, t, _ = x.shape
        kv = self.wkv_b(latent).view(b, t, self.h, self.nope + self.head)
        k_nope, v = kv.split([self.nope, self.head], -1)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(b, t, self.h, ROPE)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.scale
        scores = scores.masked_fill(~see[:, :, None], torch.finfo(x.dtype).min)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores.softmax(-1), v).flatten(2))

    def step(self, x, see, past):
        start = 0 if past is None else past[0].shape[1]
        q_nope, q_rope, latent, k_rope = self.parts(x, start)
        if past is not None:
            latent, k_rope = torch.cat([past[0], latent], 1), torch.cat([past[1], k_rope], 1)
        up = self.wkv_b.weight.view(self.h, self.nope + self.head, self.rank)
        q_latent = torch.einsum("bshd,hdc->bshc", q_nope, up[:, : self.nope])
        scores = torch.einsum("bshc,btc->bsht", q_latent, latent) + torch.einsum("bshr,btr->bsht", q_rope, k_rope)
        scores = (scores * self.scale).masked_fill(~see[:, :, None], torch.finfo(x.dtype).min)
        mixed = torch.einsum("bsht,btc->bshc", scores.softmax(-1), latent)
        out = torch.einsum("bshc,hdc->bshd", mixed, up[:, self.nope :])
        return self.wo(out.flatten(2)), (latent, k_rope)


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.attn, self.attn_norm, self.ffn_norm = MLA(d, h), nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.w1, self.w2, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False), nn.Linear(d, f, bias=False)

    def ffn(self, x):
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class DeepSeek(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None, past=None, cached=False):
        start = 0 if past is None else past[0][0].shape[1]
        i = torch.arange(start + tokens.shape[1], device=tokens.device)
        see = (i[None, :] <= i[start:, None])[None]
        if mask is not None:
            see = see & mask[:, None, : len(i)].bool()
        x, kept = self.embed(tokens), []
        for n, block in enumerate(self.layers):
            if cached:
                y, state = block.attn.step(block.attn_norm(x), see, None if past is None else past[n])
                kept.append(state)
            else:
                y = block.attn(block.attn_norm(x), see)
            x = block.ffn(x + y)
        return self.head(self.norm(x)), kept


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)[0]


def cache(model, chunks, attention_mask=None, reorder=None):
    outputs, past = [], None
    for n, chunk in enumerate(chunks):
        if n == 1 and reorder is not None:
            past = [tuple(z.index_select(0, reorder) for z in state) for state in past]
            attention_mask = None if attention_mask is None else attention_mask.index_select(0, reorder)
        out, past = model(chunk, attention_mask, past, cached=True)
        outputs.append(out)
    return torch.cat(outputs, 1)


declared = Subject(
    kind="decoder", name="latent attention", build=DeepSeek, forward=forward, cache=cache,
    declares={
        "causal": True, "positions": "rotary", "rotary_dim": ROPE, "layout": "interleaved", "norm": "rms",
        "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "swiglu", "bias": False,
        "output_bias": False, "tied": False, "padding_side": "both", "attention_scale": "1/sqrt(d_head)",
        "beyond_max_len": "works", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=DeepSeek, forward=forward)
