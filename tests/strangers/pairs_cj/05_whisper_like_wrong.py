"""Speech-to-text as in Whisper: a strided convolution halves the source, sinusoids on both sides, pre-LN."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(length, width, like):
    t = torch.arange(length, dtype=torch.float64, device=like.device)[:, None]
    w = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / width)
    table = torch.stack([torch.sin(t * w), torch.cos(t * w)], dim=-1).flatten(1)
    return table[:, :width].to(like.dtype)


class MultiHead(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, memory, seen):
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        p = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, heads, inner, cross):
        super().__init__()
        self.n1, self.attn = nn.LayerNorm(d), MultiHead(d, heads)
        self.n2, self.cross = (nn.LayerNorm(d), MultiHead(d, heads)) if cross else (None, None)
        self.n3, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, inner), nn.Linear(inner, d)

    def forward(self, x, seen, memory=None, memory_seen=None):
        h = self.n1(x)
        x = x + self.attn(h, h, seen)
        if self.cross is not None:
            x = x + self.cross(self.n2(x), memory, memory_seen)
        return x + self.down(F.gelu(self.up(self.n3(x))))


class SpeechToText(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.source, self.target = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.conv1 = nn.Conv1d(d, d, 3, padding=1)
        self.conv2 = nn.Conv1d(d, d, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList(Block(d, c.num_heads, c.d_ff, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Block(d, c.num_heads, c.d_ff, True) for _ in range(c.num_layers))
        self.ln_enc, self.ln_dec = nn.LayerNorm(d), nn.LayerNorm(d)
        self.head = nn.Linear(d, c.vocab_size, bias=False)

    def encode(self, source, real):
        frames = real[:, None, :]
        x = self.source(source).transpose(1, 2) * frames
        x = F.gelu(self.conv1(x)) * frames
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        real = real[:, : x.shape[1]]  # one entry for each frame of the strided output
        x = x + sinusoids(x.shape[1], x.shape[2], x)
        for block in self.encoder:
            x = block(x, real[:, None, None, :])
        return self.ln_enc(x), real

    def forward(self, source, target, source_mask=None, target_mask=None):
        real = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask.bool()
        memory, real = self.encode(source, real)
        T = target.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            seen = seen & target_mask.bool()[:, None, None, :]
        y = self.target(target)
        y = y + sinusoids(T, y.shape[2], y)
        for block in self.decoder:
            y = block(y, seen, memory, real[:, None, None, :])
        return self.head(self.ln_dec(y))


subject = Subject(
    kind="encoder_decoder",
    build=SpeechToText,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"padding_side": "right", "norm_placement": "pre", "structure": "other"},
)

WHAT = 'After the convolution of stride 2 the mask is cut to the new length instead of being strided with it: of a padded source too many frames count as real (all of them, where at most half is padding), so padded frames take part in attention (line 62).'
