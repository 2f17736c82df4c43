"""Utterance classifier: a small encoder and attentive statistics pooling with global context, as in ECAPA-TDNN."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Encoder(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, keep):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        off = ~keep[:, None, None, :]
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(off, torch.finfo(q.dtype).min)
        x = x + self.out((s.softmax(-1).masked_fill(off, 0.0) @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(self.norm2(x))))


def statistics(h, weight):
    """Weighted mean and deviation over time; weight [B, T, 1 or D] sums to one."""
    mean = (weight * h).sum(1)
    variance = (weight * (h - mean.unsqueeze(1)).square()).sum(1)
    return mean, variance.clamp(min=1e-5).sqrt()


class SpeakerClassifier(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Encoder(dim, heads, hidden) for _ in range(layers))
        self.score1, self.score2 = nn.Linear(3 * dim, dim), nn.Linear(dim, dim)
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, tokens, keep=None):
        if keep is None:
            keep = torch.ones_like(tokens, dtype=torch.bool)
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h, keep)
        real = keep.unsqueeze(-1).to(h.dtype)
        context = statistics(h, torch.full_like(real, 1 / real.shape[1]))
        context = torch.cat(context, -1).unsqueeze(1).expand(-1, h.shape[1], -1)
        scores = self.score2(torch.tanh(self.score1(torch.cat((h, context), -1))))
        off = ~keep.unsqueeze(-1)
        weight = scores.masked_fill(off, torch.finfo(scores.dtype).min).softmax(1).masked_fill(off, 0.0)
        return self.head(torch.cat(statistics(h, weight), -1))


subject = Subject(
    kind="classifier",
    build=lambda c: SpeakerClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "none"},
)

WHAT = 'The global context of the pooling is the mean and deviation over all frames, padding among them; only the attention over time is masked (line 48).'
