"""A sentence classifier that weighs its tokens by a learned score; its encoder is one function in a loop."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class AttentionPool(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.hidden, self.score = nn.Linear(d, d), nn.Linear(d, 1, bias=False)

    def forward(self, x, real):
        s = self.score(torch.tanh(self.hidden(x))).squeeze(-1)
        s = s.masked_fill(~real, torch.finfo(s.dtype).min)
        return torch.einsum("bt,btd->bd", s.softmax(-1), x)


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, f = c.d_model, c.d_ff
        self.heads, self.p = c.num_heads, c.dropout
        self.emb, self.pos = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.qkv = nn.ModuleList([nn.Linear(d, 3 * d) for _ in range(c.num_layers)])
        self.proj = nn.ModuleList([nn.Linear(d, d) for _ in range(c.num_layers)])
        self.fc1 = nn.ModuleList([nn.Linear(d, f) for _ in range(c.num_layers)])
        self.fc2 = nn.ModuleList([nn.Linear(f, d) for _ in range(c.num_layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(2 * c.num_layers + 1)])
        self.pool = AttentionPool(d)
        self.head = nn.Sequential(nn.Dropout(c.dropout), nn.Linear(d, c.num_classes))

    def forward(self, ids, mask=None):
        b, t = ids.shape
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        see = real[:, None, None, :] | ~real.any(1)[:, None, None, None]
        x = self.emb(ids) + self.pos(torch.arange(t, device=ids.device).expand(b, t))
        for i, (qkv, proj, fc1, fc2) in enumerate(zip(self.qkv, self.proj, self.fc1, self.fc2)):
            y = qkv(self.norms[2 * i](x)).view(b, t, 3 * self.heads, -1).transpose(1, 2)
            q, k, v = y[:, : self.heads], y[:, self.heads : 2 * self.heads], y[:, 2 * self.heads :]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=see.expand(b, 1, t, t))
            x = x + F.dropout(proj(y.transpose(1, 2).flatten(2)), self.p, self.training)
            x = x + F.dropout(fc2(F.gelu(fc1(self.norms[2 * i + 1](x)))), self.p, self.training)
        return self.head(self.pool(self.norms[-1](x), real))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="classifier", name="attention pooling", build=Classifier, forward=forward,
    declares={
        "pooling": "weighted", "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "residual": True, "activation": "gelu", "output_bias": True, "padding_side": "right",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "error", "embedding_scale": False,
    },
)
undeclared = Subject(kind="classifier", build=Classifier, forward=forward)
