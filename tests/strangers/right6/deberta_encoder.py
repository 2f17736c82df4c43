"""DeBERTa: content to content, content to place, place to content; scale 1/sqrt(3 d_head)."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

SPAN = 6


class DisentangledSelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.k = h, d // h
        self.in_proj = nn.Linear(d, 3 * d, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.pos_proj, self.pos_q_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d)
        self.dense = nn.Linear(d, d)

    def split(self, x):
        return x.unflatten(-1, (self.h, self.k)).transpose(-3, -2)

    def forward(self, x, see, rel):
        b, t, d = x.shape
        q, k, v = self.in_proj(x).view(b, t, self.h, 3 * self.k).transpose(1, 2).chunk(3, -1)
        q = q + self.q_bias.view(self.h, 1, self.k)
        v = v + self.v_bias.view(self.h, 1, self.k)
        q = q / (3 * self.k) ** 0.5
        i = torch.arange(t, device=x.device)
        delta = (i[:, None] - i[None, :]).clamp(-SPAN, SPAN - 1) + SPAN  # [query, key] -> row of the table
        scores = q @ k.transpose(-1, -2)
        c2p = q @ self.split(self.pos_proj(rel)).transpose(-1, -2)  # b h t 2S
        scores = scores + c2p.gather(-1, delta.expand(b, self.h, t, t))
        pos_q = self.split(self.pos_q_proj(rel)) / (3 * self.k) ** 0.5
        p2c = k @ pos_q.transpose(-1, -2)  # b h key 2S; row j, column i: the table at j - i
        scores = scores + p2c.gather(-1, delta.expand(b, self.h, t, t)).transpose(-1, -2)
        scores = scores.masked_fill(~see, torch.finfo(x.dtype).min)
        probs = scores.softmax(-1).masked_fill(~see, 0.0)
        return self.dense((probs @ v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.attention = DisentangledSelfAttention(d, h)
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-7), nn.LayerNorm(d, eps=1e-7)
        self.up, self.act, self.down = nn.Linear(d, f), nn.GELU(), nn.Linear(f, d)

    def forward(self, x, see, rel):
        x = self.norm1(self.attention(x, see, rel) + x)
        return self.norm2(self.down(self.act(self.up(x))) + x)


class Deberta(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(c.vocab_size, c.d_model), nn.LayerNorm(c.d_model, eps=1e-7)
        self.rel_embeddings = nn.Embedding(2 * SPAN, c.d_model)
        self.layer = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])

    def forward(self, tokens, mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        x = self.norm(self.embeddings(tokens)) * mask[..., None]
        see = mask[:, None, :, None] & mask[:, None, None, :]
        for layer in self.layer:
            x = layer(x, see, self.rel_embeddings.weight)
        return x


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


# the scale is 1/sqrt(3 d_head): one number for one width of head
sizes = {"d_model": (8,), "num_heads": (2,)}
declared = Subject(
    kind="encoder", name="DeBERTa", build=Deberta, forward=forward, domain=sizes,
    declares={
        "causal": False, "positions": "relative", "attention_scale": (3 * 4) ** -0.5, "norm": "layer",
        "norm_placement": "post", "residual": True, "activation": "gelu", "padding_side": "both",
        "beyond_max_len": "works", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="encoder", build=Deberta, forward=forward)
