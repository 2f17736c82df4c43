WHAT = "sliding window of 3 with a key-value cache that is a ring buffer of 3 slots, chunks of any size, beam reorder, greedy generation; grouped queries, SwiGLU in one matrix"
import torch
from torch import nn
from torch.nn import functional as F

WINDOW = 3


def rope(x, at):  # x [B, H, T, K], at [T]; pairs (0, 1), (2, 3), ...
    K = x.shape[-1]
    w = 10000.0 ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    z = torch.polar(torch.ones((), dtype=torch.float64, device=x.device), at.double()[:, None] * w)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], K // 2, 2).contiguous())
    return torch.view_as_real(pairs * z.to(pairs.dtype)).flatten(-2).to(x.dtype)


class Ring:
    """Keys and values of the last WINDOW positions; slot = position % WINDOW."""

    def __init__(self, layers):
        self.keys, self.values = [None] * layers, [None] * layers
        self.places, self.real, self.length = [None] * layers, [None] * layers, 0

    def read(self, i):
        return self.keys[i], self.values[i], self.places[i], self.real[i]

    def write(self, i, k, v, at, real):
        keep = min(WINDOW, at.numel())
        slots = at[-keep:] % WINDOW
        if self.keys[i] is None:
            B, G, _, K = k.shape
            self.keys[i], self.values[i] = k.new_zeros(B, G, WINDOW, K), v.new_zeros(B, G, WINDOW, K)
            self.places[i] = at.new_full((WINDOW,), -WINDOW)
            self.real[i] = real.new_zeros(B, WINDOW)
        self.keys[i] = self.keys[i].index_copy(2, slots, k[:, :, -keep:])
        self.values[i] = self.values[i].index_copy(2, slots, v[:, :, -keep:])
        self.places[i] = self.places[i].index_copy(0, slots, at[-keep:])
        self.real[i] = self.real[i].index_copy(1, slots, real[:, -keep:])

    def reorder(self, beams):
        self.keys = [t.index_select(0, beams) for t in self.keys]
        self.values = [t.index_select(0, beams) for t in self.values]
        self.real = [t.index_select(0, beams) for t in self.real]


class Layer(nn.Module):
    def __init__(self, d, h, g, ff):
        super().__init__()
        self.h, self.g, self.k = h, g, d // h
        self.wq, self.wo = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.wk, self.wv = (nn.Linear(d, g * self.k, bias=False) for _ in range(2))
        self.w13, self.w2 = nn.Linear(d, 2 * ff, bias=False), nn.Linear(ff, d, bias=False)
        self.n1, self.n2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)

    def forward(self, x, at, real, ring=None, index=0):
        B, T, D = x.shape
        n = self.n1(x)
        q = rope(self.wq(n).view(B, T, self.h, -1).transpose(1, 2), at)
        k = rope(self.wk(n).view(B, T, self.g, -1).transpose(1, 2), at)
        v = self.wv(n).view(B, T, self.g, -1).transpose(1, 2)
        keys, values, places, there = k, v, at, real
        if ring is not None:
            if ring.keys[index] is not None:
                a, b, c, d = ring.read(index)
                keys, values = torch.cat([a, k], 2), torch.cat([b, v], 2)
                places, there = torch.cat([c, at]), torch.cat([d, real], 1)
            ring.write(index, k, v, at, real)
        far = at[:, None] - places
        seen = ((far >= 0) & (far < WINDOW))[None, None] & there[:, None, None]
        y = F.scaled_dot_product_attention(
            q, keys.repeat_interleave(self.h // self.g, 1), values.repeat_interleave(self.h // self.g, 1),
            attn_mask=torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min / 2))
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, D))
        gate, up = self.w13(self.n2(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


class Mistral(nn.Module):
    def __init__(self, vocab, d, h, g, layers, ff):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, g, ff) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, vocab, bias=False)

    def forward(self, ids, mask=None, ring=None):
        start = 0 if ring is None else ring.length
        at = torch.arange(start, start + ids.shape[1], device=ids.device)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        x = self.tok(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, at, real, ring, i)
        if ring is not None:
            ring.length += ids.shape[1]
        return self.output(self.norm(x))


from veriformer.properties import Subject


def build(c):
    return Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


def cached(model, chunks, attention_mask=None, reorder=None):
    ring, out, start = Ring(len(model.layers)), [], 0
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            ring.reorder(torch.as_tensor(reorder, device=chunk.device))
        part = None if attention_mask is None else attention_mask[:, start : start + chunk.shape[1]]
        out.append(model(chunk, part, ring))
        start += chunk.shape[1]
    return torch.cat(out, 1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    ring = Ring(len(model.layers)) if use_cache else None
    new = tokens
    for _ in range(steps):
        logits = model(new if use_cache else tokens, None, ring)
        new = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], 1)
    return tokens


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="ring buffer", build=build, forward=forward, cache=cached, generate=generate,
    declares={"window": WINDOW, "positions": "rotary", "layout": "interleaved", "grouped_queries": True, "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "activation": "swiglu", "tied": False, "bias": False,
              "output_bias": False, "padding_side": "both", "beyond_max_len": "works"},
)
