# A Branchformer for text classification: attention beside a gated depthwise convolution, merged by a linear map.
import torch
from torch import nn, einsum

from veriformer.properties import Subject


class Global(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        head = width // heads
        self.w = nn.Parameter(torch.randn(3, heads, width, head) / width**0.5)
        self.out = nn.Parameter(torch.randn(heads, head, width) / width**0.5)

    def forward(self, x, mask):
        q, k, v = einsum("btd,nhdk->nbhtk", self.norm(x), self.w)
        scores = einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        return einsum("bhts,bhsk,hkd->btd", scores.softmax(-1), v, self.out)


class Local(nn.Module):
    def __init__(self, width, kernel=3):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        content, gate = self.into(self.norm(x)).chunk(2, -1)
        content = content.masked_fill(~mask[..., None], 0.0)
        content = self.conv(content.transpose(1, 2)).transpose(1, 2)
        return self.out(content * torch.sigmoid(gate))


class Branches(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention, self.convolution = Global(width, heads), Local(width)
        self.merge = nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)
        )

    def forward(self, x, mask):
        x = x + self.merge(torch.cat([self.attention(x, mask), self.convolution(x, mask)], -1))
        return x + self.mlp(x)


class Branchformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.table = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Branches(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.classes = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x).masked_fill(~mask[..., None], 0.0)
        return self.classes(x.sum(1) / mask.sum(1, keepdim=True))


def run(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


subject = Subject(kind="classifier", name="Branchformer", build=Branchformer, forward=run, declares={"pooling": "mean"})
