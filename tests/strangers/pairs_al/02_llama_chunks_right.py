import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rope(x, start):
    d = x.shape[-1]
    inv = 1.0 / (10000 ** (torch.arange(0, d, 2, device=x.device, dtype=x.dtype) / d))
    ang = torch.arange(start, start + x.shape[-2], device=x.device, dtype=x.dtype)[:, None] * inv
    ang = torch.cat((ang, ang), -1)
    return x * ang.cos() + rotate_half(x) * ang.sin()


class LlamaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.H, self.G = c.d_model, c.num_heads, c.num_key_value_heads
        self.hd = d // self.H
        self.q_proj = nn.Linear(d, self.H * self.hd, bias=False)
        self.k_proj = nn.Linear(d, self.G * self.hd, bias=False)
        self.v_proj = nn.Linear(d, self.G * self.hd, bias=False)
        self.o_proj = nn.Linear(self.H * self.hd, d, bias=False)
        self.gate, self.up = nn.Linear(d, c.d_ff, bias=False), nn.Linear(d, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, d, bias=False)
        self.n1, self.n2 = RMSNorm(d), RMSNorm(d)

    def forward(self, x, past=None):
        b, t, _ = x.shape
        h = self.n1(x)
        start = 0 if past is None else past[0].shape[2]
        q = rope(self.q_proj(h).view(b, t, self.H, self.hd).transpose(1, 2), start)
        k = rope(self.k_proj(h).view(b, t, self.G, self.hd).transpose(1, 2), start)
        v = self.v_proj(h).view(b, t, self.G, self.hd).transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        present = (k, v)
        k, v = (z.repeat_interleave(self.H // self.G, 1) for z in present)
        seen = torch.ones(t, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), present


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([LlamaLayer(c) for _ in range(c.num_layers)])
        self.norm, self.lm_head = RMSNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids, past_key_values=None):
        x, presents = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, None if past_key_values is None else past_key_values[i])
            presents.append(present)
        return self.lm_head(self.norm(x)), presents


def cached(model, chunks):
    past, outs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outs.append(logits)
    return torch.cat(outs, 1)


subject = Subject(
    kind="decoder", name="llama", build=Llama, forward=lambda m, tokens: m(tokens)[0], cache=cached,
    domain={"d_model": [8, 16], "num_heads": [2, 4]},
    declares={"positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "swiglu", "bias": False},
)
