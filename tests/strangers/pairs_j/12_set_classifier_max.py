"""A classifier of sets: no positions, the maximum over the members."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "padded members are set to 0 before the maximum is taken, not to the smallest number"
CAUSE = (
    "The max-pooling multiplies by the mask, so that padded positions take part as zeros: channels that are negative "
    "at all real positions come out as 0 as soon as there is padding."
)


class SetAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, mask=None):
        n, t, d = x.shape
        q, k, v = (f(x).view(n, t, self.heads, d // self.heads) for f in (self.fc_q, self.fc_k, self.fc_v))
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k) / (d // self.heads) ** 0.5
        if mask is not None:
            energy = energy.masked_fill(~mask[:, None, None, :], torch.finfo(energy.dtype).min)
        out = torch.einsum("nhqk,nkhd->nqhd", energy.softmax(dim=3), v)
        return self.fc_o(out.reshape(n, t, d))


class SetBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention = SetAttention(dim, heads)
        self.norm0, self.norm1 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x, mask=None):
        x = self.norm0(x + self.attention(x, mask))
        return self.norm1(x + self.ff(x))


class SetClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([SetBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.fc = nn.Linear(c.d_model, c.num_classes)

    def pool(self, x, mask):
        if mask is None:
            return x.amax(dim=1)
        top = x.masked_fill(~mask[..., None], torch.finfo(x.dtype).min).amax(dim=1)
        return torch.where(mask.any(dim=1, keepdim=True), top, torch.zeros_like(top))

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.fc(self.pool(x, mask))


class BagClassifier(SetClassifier):
    def pool(self, x, mask):
        if mask is None:
            return x.amax(dim=1)
        return (x * mask[..., None].to(x.dtype)).amax(dim=1)


def subject(model):
    return Subject(
        kind="classifier",
        name="set classifier",
        build=model,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"pooling": "max", "positions": "none"},
    )


right = subject(SetClassifier)
wrong = subject(BagClassifier)
