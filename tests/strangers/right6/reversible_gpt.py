"""Reversible blocks (Reformer's two streams), checkpointed, sdpa with is_causal or a mask."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import DrawnConfig, Subject


class F1(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(d), h
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, real):
        b, t, d = x.shape
        z = self.in_proj(self.norm(x)).view(b, t, self.heads, -1).transpose(1, 2)  # each head: q | k | v
        q, k, v = z.chunk(3, dim=-1)
        if real is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            see = torch.ones(t, t, dtype=torch.bool, device=x.device).tril() & real[:, None, None, :]
            see = see | torch.eye(t, dtype=torch.bool, device=x.device)  # padded queries see themselves
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, d))


class G1(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, f), nn.GELU(approximate="tanh"), nn.Linear(f, d))

    def forward(self, x):
        return self.net(x)


class Reversible(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.f, self.g = F1(d, h), G1(d, f)

    def forward(self, x1, x2, real):
        y1 = x1 + self.f(x2, real)
        return y1, x2 + self.g(y1)

    def inverse(self, y1, y2, real):
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2, real), x2


class ReversibleGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([Reversible(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, mask=None):
        real = None if mask is None else mask.bool()
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        a, b = x, x
        for block in self.blocks:
            if torch.is_grad_enabled():
                a, b = checkpoint(block, a, b, real, use_reentrant=False)
            else:
                a, b = block(a, b, real)
        return self.head(self.norm((a + b) / 2))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="reversible GPT", build=ReversibleGPT, forward=forward,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "other", "final_norm": True,
        "activation": "gelu_tanh", "bias": True, "output_bias": True, "tied": False, "padding_side": "right",
        "beyond_max_len": "error", "attention_scale": "1/sqrt(d_head)", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=ReversibleGPT, forward=forward)
