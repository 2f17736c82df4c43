import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, h + 1) / h), persistent=False)

    def forward(self, x, pos, past=None):
        """past: keys, values and their positions; returns the output and what the next chunk needs."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        kpos = pos
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            kpos = torch.cat((past[2], pos))
        distance = pos[:, None] - kpos[None, :]
        bias = -self.slopes.to(x.dtype)[:, None, None] * distance.to(x.dtype)
        bias = bias.masked_fill((distance < 0) | (distance >= WINDOW), float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        kept = k[:, :, -WINDOW:], v[:, :, -WINDOW:], kpos[-WINDOW:]
        return self.out(y.transpose(1, 2).reshape(B, T, D)), kept


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), Attention(d, h)
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, pos, past=None):
        y, kept = self.attn(self.ln1(x), pos, past)
        x = x + y
        return x + self.down(F.gelu(self.up(self.ln2(x)))), kept


class WindowLM(nn.Module):
    def __init__(self, vocab, d, h, n, f):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, h, f) for _ in range(n))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, start=0, cache=None):
        x = self.wte(tokens)
        pos = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        kept = []
        for i, block in enumerate(self.blocks):
            x, new = block(x, pos, cache[i] if cache else None)
            kept.append(new)
        return self.head(self.ln_f(x)), kept

    def stream(self, chunks):
        outputs, cache, start = [], None, 0
        for chunk in chunks:
            logits, cache = self(chunk, start, cache)
            start += chunk.shape[1]
            outputs.append(logits)
        return outputs


subject = Subject(
    kind="decoder",
    name="ALiBi with a sliding window",
    build=lambda c: WindowLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=lambda m, chunks: m.stream(chunks),
    declares={"causal": True, "positions": "alibi", "slopes": "geometric", "window": 4, "norm": "layer",
              "norm_placement": "pre", "final_norm": True, "activation": "gelu", "bias": False},
)
