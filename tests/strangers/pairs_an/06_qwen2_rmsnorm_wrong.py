WHAT = 'gradient lost: the statistics of the RMS norm are computed under no_grad, so the outputs are right and the gradient of all that is before a norm lacks the term through the root mean square (line 11: with torch.no_grad():)'
"""Qwen2 in functional style: a dict of parameters and einsum; biases on q, k and v alone."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rms_norm(x, gain, eps=1e-6):
    with torch.no_grad():
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * inverse * gain


def rope(x, base=10000.0):
    """x [b, h, t, k]; channel i is turned together with channel i + k/2."""
    half = x.shape[-1] // 2
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    phase = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * rate
    c, s = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * c - right * s, left * s + right * c), dim=-1)


def attention(p, x, allowed):
    q = rope(torch.einsum("btd,dhk->bhtk", x, p["wq"]) + p["bq"][:, None])
    k = rope(torch.einsum("btd,dgk->bgtk", x, p["wk"]) + p["bk"][:, None])
    v = torch.einsum("btd,dgk->bgtk", x, p["wv"]) + p["bv"][:, None]
    groups = k.shape[1]
    q = q.unflatten(1, (groups, -1))  # [b, g, r, t, k]
    scores = torch.einsum("bgrtk,bgsk->bgrts", q, k) / q.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~allowed, torch.finfo(x.dtype).min), -1) * allowed
    mixed = torch.einsum("bgrts,bgsk->bgrtk", weights, v).flatten(1, 2)
    return torch.einsum("bhtk,hkd->btd", mixed, p["wo"])


def feed_forward(p, x):
    return (F.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


class Qwen2(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, H, G, K, M = c.d_model, c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads, c.d_ff
        if K % 2:
            raise ValueError("an odd width cannot be turned in pairs")

        def w(*shape, fan):
            return nn.Parameter(torch.randn(*shape) * fan**-0.5)

        self.embed = nn.Parameter(torch.randn(c.vocab_size, D))
        self.blocks = nn.ModuleList(
            nn.ParameterDict(
                {
                    "ln1": nn.Parameter(torch.ones(D)), "ln2": nn.Parameter(torch.ones(D)),
                    "wq": w(D, H, K, fan=D), "wk": w(D, G, K, fan=D), "wv": w(D, G, K, fan=D),
                    "bq": nn.Parameter(torch.zeros(H, K)), "bk": nn.Parameter(torch.zeros(G, K)),
                    "bv": nn.Parameter(torch.zeros(G, K)), "wo": w(H, K, D, fan=D),
                    "gate": w(D, M, fan=D), "up": w(D, M, fan=D), "down": w(M, D, fan=M),
                }
            )
            for _ in range(c.num_layers)
        )
        self.norm = nn.Parameter(torch.ones(D))

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, None, :]
        x = self.embed[tokens]
        for p in self.blocks:
            x = x + attention(p, rms_norm(x, p["ln1"]), allowed)
            x = x + feed_forward(p, rms_norm(x, p["ln2"]))
        return rms_norm(x, self.norm) @ self.embed.T


subject = Subject(
    kind="decoder",
    name="Qwen2",
    build=Qwen2,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "activation": "swiglu", "tied": True, "grouped_queries": True, "padding_side": "both",
    },
)
