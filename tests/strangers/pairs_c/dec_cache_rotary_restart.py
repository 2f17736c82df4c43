
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def rope(x, pos):
    n = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(n, device=x.device, dtype=x.dtype) / n)
    a, b, rest = x[..., :n], x[..., n:2 * n], x[..., 2 * n:]
    ang = pos[..., None].to(x.dtype) * rate
    cos, sin = ang.cos(), ang.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.g, k = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        self.n1, self.n2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.q, self.o = nn.Linear(c.d_model, self.h * k, bias=False), nn.Linear(self.h * k, c.d_model, bias=False)
        self.k, self.v = (nn.Linear(c.d_model, self.g * k, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, pos, ok, past):
        y = self.n1(x)
        q = rope(self.q(y).unflatten(-1, (self.h, -1)).transpose(1, 2), pos)
        k = rope(self.k(y).unflatten(-1, (self.g, -1)).transpose(1, 2), pos)
        v = self.v(y).unflatten(-1, (self.g, -1)).transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        r = self.h // self.g
        s = q @ k.repeat_interleave(r, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        x = x + self.o((w @ v.repeat_interleave(r, 1)).transpose(1, 2).flatten(2))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), (k, v)


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def run(self, tokens, mask=None, past=None):
        """mask: [B, past + T]. Gives logits of the new tokens and the cache."""
        n, T = (past[0][0].shape[2] if past else 0), tokens.shape[1]
        pos = torch.arange(n, n + T, device=tokens.device)
        ok = (torch.arange(n + T, device=tokens.device) <= pos[:, None])[None, None]
        if mask is not None:
            ok = ok & mask[:, None, None, :]
        x, new = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, pos - n if self.bug else pos, ok, past[i] if past else None)
            new.append(kv)
        return self.head(self.norm(x)), new

    def forward(self, tokens, mask=None):
        return self.run(tokens, mask)[0]


def cached(m, chunks, attention_mask=None):
    past, out, n = None, [], 0
    for chunk in chunks:
        n += chunk.shape[1]
        y, past = m.run(chunk, None if attention_mask is None else attention_mask[:, :n], past)
        out.append(y)
    return torch.cat(out, 1)


@torch.no_grad()
def generate(m, tokens, steps, use_cache):
    past, feed = None, tokens
    for _ in range(steps):
        if use_cache:
            logits, past = m.run(feed, None, past)
        else:
            logits = m(tokens)
        feed = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, feed), 1)
    return tokens




WHAT = 'With a cache the rotary positions of each new chunk start again at 0 instead of at the number of cached tokens.'
PLACE = 'rotary positions in the cached path of the decoder'


def make(bug):
    return Subject(
        kind="decoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={'causal': True, 'positions': 'rotary', 'norm': 'rms', 'norm_placement': 'pre', 'activation': 'swiglu', 'bias': False, 'grouped_queries': True},
        cache=cached,
        generate=generate,
    )


right, wrong = make(False), make(True)
