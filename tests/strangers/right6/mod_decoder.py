"""Mixture of depths, causal: each token decides for itself whether a block sees it; the chosen are packed."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class Inner(nn.Module):
    """A block's update on packed tokens; the order of the packed is that of the sequence."""

    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, real):
        b, n, d = x.shape
        q, k, v = (z.view(b, n, self.h, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).split(d, -1))
        s = q @ k.transpose(-1, -2) * (d // self.h) ** -0.5
        see = torch.ones(n, n, dtype=torch.bool, device=x.device).tril() & real[:, None, None]
        s = s.masked_fill(~see, torch.finfo(s.dtype).min)
        a = self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
        return a + self.down(F.gelu(self.up(self.ln2(x + a))))


class DepthBlock(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.router, self.inner = nn.Linear(d, 1), Inner(d, h, f)

    def forward(self, x, real):
        gate = self.router(x).sigmoid().squeeze(-1)
        chosen = (gate > 0.5) & real
        most = int(chosen.sum(1).max())
        if most == 0:
            return x
        order = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        wide = order[..., None].expand(-1, -1, x.shape[-1])
        kept = chosen.gather(1, order)
        update = self.inner(x.gather(1, wide), kept) * (gate.gather(1, order) * kept)[..., None]
        return x.scatter_add(1, wide, update)


class MoD(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(DepthBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, real)
        return self.head(self.ln(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="mixture of depths", build=MoD, forward=forward,
    declares={
        "causal": True, "positions": "learned", "sparse": True, "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "gelu", "output_bias": False, "tied": False,
        "padding_side": "right", "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "error",
        "structure": "other", "embedding_scale": False, "batch_coupled": False,
    },
)
undeclared = Subject(kind="decoder", build=MoD, forward=forward)
