"""A reward head on a causal trunk: scores are read at the last token; left padding is supported (RLHF rollouts)."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc_in, self.fc_out = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, allowed):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhik,bhjk->bhij", q, k) / (w // self.heads) ** 0.5
        s = s.masked_fill(~allowed[:, None], torch.finfo(s.dtype).min)
        x = x + self.proj(torch.einsum("bhij,bhjk->bihk", s.softmax(-1), v).reshape(b, t, w))
        return x + self.fc_out(F.gelu(self.fc_in(self.norm_b(x))))


class Reward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.score = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        t = tokens.shape[1]
        x = self.wte(tokens) + self.wpe((mask.long().cumsum(-1) - 1).clamp(min=0))
        steps = torch.arange(t, device=tokens.device)
        allowed = (steps <= steps[:, None]) & mask[:, None, :] | (steps == steps[:, None])
        for layer in self.layers:
            x = layer(x, allowed)
        last = mask.long().sum(-1) - 1
        return self.score(self.ln_f(x[torch.arange(len(x), device=x.device), last]))


subject = Subject(
    kind="classifier",
    name="reward head",
    build=Reward,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "last", "positions": "learned", "padding_side": "both"},
)

WHAT = 'Line 43: the place of the last token is taken as the number of real tokens less one, which holds for padding on the right alone; padded on the left another token, or padding, is scored.'
