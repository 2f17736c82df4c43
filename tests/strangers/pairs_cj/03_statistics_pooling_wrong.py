"""Speaker classifier: a small Transformer and ECAPA-TDNN's attentive statistics pooling with global context."""
import torch
from torch import nn

from veriformer.properties import Subject


def moments(h, w):
    """Weighted mean and deviation over time; w [B, T, 1 or C] sums to one."""
    mu = (w * h).sum(1)
    var = (w * (h - mu[:, None]).square()).sum(1)
    return mu, (var + 1e-5).sqrt()


class AttentiveStatistics(nn.Module):
    def __init__(self, channels, bottleneck):
        super().__init__()
        self.score = nn.Sequential(
            nn.Linear(3 * channels, bottleneck), nn.Tanh(), nn.Linear(bottleneck, channels)
        )

    def forward(self, h, real):
        uniform = torch.full_like(h[..., :1], 1.0 / h.shape[1])
        mu, sd = moments(h, uniform)
        context = torch.cat([h, mu[:, None].expand_as(h), sd[:, None].expand_as(h)], dim=-1)
        e = self.score(context).masked_fill(~real[..., None], torch.finfo(h.dtype).min)
        alpha = e.softmax(dim=1).masked_fill(~real[..., None], 0.0)
        return torch.cat(moments(h, alpha), dim=-1)


class Block(nn.Module):
    def __init__(self, d, heads, inner):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, inner), nn.GELU(), nn.Linear(inner, d))

    def forward(self, x, real):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = (q @ k.mT) * q.shape[-1] ** -0.5
        hide = ~real[:, None, None]
        p = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
        x = x + self.proj((p @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class SpeakerNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.frames = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.pool = AttentiveStatistics(c.d_model, max(4, c.d_model // 2))
        self.classify = nn.Linear(2 * c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.frames(tokens)
        for block in self.blocks:
            x = block(x, real)
        return self.classify(self.pool(x, real))


subject = Subject(
    kind="classifier",
    build=SpeakerNet,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"positions": "none", "pooling": "other", "padding_side": "both", "norm_placement": "pre"},
)

WHAT = 'The global context (mean and deviation that the attention scores are made from) is taken over all frames, padded ones too; only the softmax behind it is masked, so the pooled vector depends on the padding (line 23).'
