"""LLaMA with grouped queries, einsum everywhere, rotary by complex numbers, a growing cache."""
import torch
from torch import einsum, nn

from veriformer.properties import DrawnConfig, Subject


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def cis(start, stop, dim, dtype, device, theta=10000.0):
    freqs = theta ** (-torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)
    angles = einsum("t,f->tf", torch.arange(start, stop, dtype=dtype, device=device), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x, turns):  # b t ... k
    z = torch.view_as_complex(x.to(wide(x.dtype)).unflatten(-1, (-1, 2)).contiguous())
    shape = [1, turns.shape[0]] + [1] * (z.dim() - 3) + [turns.shape[1]]
    return torch.view_as_real(z * turns.view(shape)).flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = x.to(wide(x.dtype))
        power = einsum("...d,...d->...", y, y) / y.shape[-1]
        return einsum("...d,...->...d", y, torch.rsqrt(power + self.eps)).to(x.dtype) * self.weight


class Layer(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        k = dim // heads
        if k % 2:
            raise ValueError("heads must be even in width")

        def weight(*shape, fan):
            return nn.Parameter(torch.randn(*shape) * fan**-0.5)

        self.wq = weight(dim, kv_heads, heads // kv_heads, k, fan=dim)
        self.wk = weight(dim, kv_heads, k, fan=dim)
        self.wv = weight(dim, kv_heads, k, fan=dim)
        self.wo = weight(kv_heads, heads // kv_heads, k, dim, fan=dim)
        self.w1, self.w3 = weight(dim, hidden, fan=dim), weight(dim, hidden, fan=dim)
        self.w2 = weight(hidden, dim, fan=hidden)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, turns, allowed, past=None):
        h = self.attention_norm(x)
        q = rotate(einsum("btd,dgrk->btgrk", h, self.wq), turns)
        k = rotate(einsum("btd,dgk->btgk", h, self.wk), turns)
        v = einsum("btd,dgk->btgk", h, self.wv)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        scores = einsum("btgrk,bsgk->bgrts", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed[:, None, None], torch.finfo(scores.dtype).min)
        y = einsum("bgrts,bsgk->btgrk", scores.softmax(-1), v)
        x = x + einsum("btgrk,grkd->btd", y, self.wo)
        h = self.ffn_norm(x)
        gate = nn.functional.silu(einsum("btd,df->btf", h, self.w1)) * einsum("btd,df->btf", h, self.w3)
        return x + einsum("btf,fd->btd", gate, self.w2), (k, v)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.k = c.d_model // c.num_heads
        self.tok_embeddings = nn.Parameter(torch.randn(c.vocab_size, c.d_model))
        self.layers = nn.ModuleList(
            Layer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
        )
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Parameter(torch.randn(c.d_model, c.vocab_size) * c.d_model**-0.5)

    def forward(self, tokens, mask=None, past=None):
        x = nn.functional.embedding(tokens, self.tok_embeddings)
        start = 0 if past is None else past[0][0].shape[1]
        stop = start + tokens.shape[1]
        turns = cis(start, stop, self.k, wide(x.dtype), x.device)
        index = torch.arange(stop, device=x.device)
        allowed = (index[None, :] <= index[start:, None])[None]
        if mask is not None:
            allowed = allowed & mask[:, None, :stop].bool()
        kept = []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, turns, allowed, None if past is None else past[i])
            kept.append(kv)
        return einsum("btd,dv->btv", self.norm(x), self.output), kept


def cache(model, chunks, attention_mask=None, reorder=None):
    outputs, past = [], None
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            past = [(k[reorder], v[reorder]) for k, v in past]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        out, past = model(chunk, attention_mask, past)
        outputs.append(out)
    return torch.cat(outputs, 1)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)[0]


declared = Subject(
    kind="decoder", name="einsum llama", build=Llama, forward=forward, cache=cache,
    declares={
        "causal": True, "positions": "rotary", "layout": "interleaved", "base": 10000, "norm": "rms",
        "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "swiglu", "bias": False,
        "output_bias": False, "tied": False, "grouped_queries": True, "padding_side": "both",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works", "reorders_mask": True, "cached_chunks": True,
    },
)
undeclared = Subject(kind="decoder", build=Llama, forward=forward)
