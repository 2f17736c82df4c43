import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def apply_rope(x, pos, base=10000.0):
    d = x.size(-1)
    theta = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
    ang = pos.double()[:, None] * theta
    c, s = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), dim=-1).flatten(-2)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        if (n_embd // n_head) % 2:
            raise ValueError("rotary needs heads of even width")
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        start = 0 if past is None else past[0].size(2)
        pos = torch.arange(start, start + T, device=x.device)
        q, k = apply_rope(q, pos), apply_rope(k, pos)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        S = k.size(2)
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, n_inner, bias=False), nn.GELU(), nn.Linear(n_inner, n_embd, bias=False)
        )

    def forward(self, x, past=None):
        a, present = self.attn(self.ln_1(x), past)
        x = x + a
        return x + self.mlp(self.ln_2(x)), present


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, n_inner):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head, n_inner) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, past=None):
        x = self.wte(idx)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def cached(model, chunks):
    past, outs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outs.append(logits)
    return torch.cat(outs, dim=1)


subject = Subject(
    kind="decoder",
    name="rotary GPT with cache",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "norm_placement": "pre",
        "activation": "gelu",
        "tied": False,
        "final_norm": True,
    },
)
