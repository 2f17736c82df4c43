"""Multi-head latent attention (DeepSeek-V2): what is cached is the compressed latent and the one rotated key of all heads."""

import torch
from torch import nn

from veriformer.properties import Subject


class LatentCache(list):
    """Per layer (latent, rotated key), and how many tokens went before."""

    length = 0


def rope(x, start):
    """Interleaved pairs, as in the paper's code; x [.., T, even]."""
    freqs = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angle = torch.arange(start, start + x.shape[-2], device=x.device)[:, None] * freqs
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class MLA(nn.Module):
    def __init__(self, dim, n_heads, cache_normed):
        super().__init__()
        head = dim // n_heads
        if head < 4:
            raise ValueError("a head holds a rotated and a plain part")
        self.n_heads, self.head, self.rank = n_heads, head, max(4, dim // 2)
        self.d_rope = head // 4 * 2
        self.d_nope = head - self.d_rope
        self.cache_normed = cache_normed
        self.wq = nn.Linear(dim, n_heads * head, bias=False)
        self.wkv_a = nn.Linear(dim, self.rank + self.d_rope, bias=False)
        self.kv_norm = nn.RMSNorm(self.rank, eps=1e-6)
        self.wkv_b = nn.Linear(self.rank, n_heads * (self.d_nope + head), bias=False)
        self.wo = nn.Linear(n_heads * head, dim, bias=False)

    def forward(self, x, start, past):
        b, t, _ = x.shape
        q_nope, q_pe = self.wq(x).view(b, t, self.n_heads, -1).transpose(1, 2).split([self.d_nope, self.d_rope], -1)
        q_pe = rope(q_pe, start)
        compressed, k_pe = self.wkv_a(x).split([self.rank, self.d_rope], -1)
        k_pe, latent = rope(k_pe, start), self.kv_norm(compressed)
        kept = latent if self.cache_normed else compressed
        if past is not None:
            kept = torch.cat((past[0], kept), 1)
            latent, k_pe = torch.cat((past[0], latent), 1), torch.cat((past[1], k_pe), 1)
        k_nope, v = self.wkv_b(latent).view(b, -1, self.n_heads, self.d_nope + self.head).transpose(1, 2).split(
            [self.d_nope, self.head], -1
        )
        scores = (q_nope @ k_nope.mT + q_pe @ k_pe[:, None].mT) * self.head**-0.5
        hidden = torch.ones(t, latent.shape[1], dtype=torch.bool, device=x.device).triu(latent.shape[1] - t + 1)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self.wo(out.transpose(1, 2).flatten(2)), (kept, k_pe)


class DeepSeek(nn.Module):
    def __init__(self, c, cache_normed):
        super().__init__()
        self.embed, self.head = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.attn = nn.ModuleList(MLA(c.d_model, c.num_heads, cache_normed) for _ in range(c.num_layers))
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model)) for _ in self.attn
        )
        self.attn_norm = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-6) for _ in self.attn)
        self.ffn_norm = nn.ModuleList(nn.RMSNorm(c.d_model, eps=1e-6) for _ in self.attn)
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)

    def forward(self, tokens, cache=None):
        h, start = self.embed(tokens), cache.length if cache is not None else 0
        for i, attn in enumerate(self.attn):
            past = cache[i] if start else None
            out, present = attn(self.attn_norm[i](h), start, past)
            if cache is not None:
                cache[i : i + 1] = [present]
            h = h + out
            h = h + self.ffn[i](self.ffn_norm[i](h))
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.head(self.norm(h))


def decode(model, chunks):
    cache = LatentCache()
    return torch.cat([model(chunk, cache) for chunk in chunks], 1)


def mla(cache_normed):
    return Subject(
        kind="decoder",
        name="MLA",
        build=lambda c: DeepSeek(c, cache_normed),
        forward=lambda m, tokens: m(tokens),
        cache=decode,
        declares={"positions": "rotary", "norm": "rms", "norm_placement": "pre", "activation": "gelu"},
    )


right, wrong = mla(True), mla(False)
WHAT = "The latents are put into the cache before their RMSNorm, and read from it as if they were normalised."
CAUSE = (
    "In MLA's cached path kv_norm acts on the new tokens only; the past comes back as the raw down-projection and goes into wkv_b unnormalised, "
    "so keys and values of earlier chunks have another size than in one pass over the whole sequence."
)
