import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject


class StaticCache:
    """Buffers of fixed size that are allocated once and used by every later call."""

    def __init__(self, layers, batch, heads, size, width, like):
        self.k = like.new_zeros(layers, batch, heads, size, width)
        self.v = torch.zeros_like(self.k)
        self.valid = torch.ones(batch, size, dtype=torch.bool, device=like.device)
        self.length = 0

    def reset(self):
        self.length = 0
        self.valid.fill_(True)

    def note(self, mask):
        self.valid[:, self.length:self.length + mask.shape[1]] &= mask

    def put(self, layer, k, v):
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length:end] = k
        self.v[layer, :, :, self.length:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln_a, self.ln_b = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, ok, cache, i):
        q, k, v = self.qkv(self.ln_a(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.put(i, k, v)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        x = x + self.o((p @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_b(x))))


class StaticLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.d, self.size = c.num_heads, c.d_model, c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln = nn.LayerNorm(c.d_model, bias=False)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.static = None

    def start(self, batch):
        w = self.wte.weight
        if self.static is None or self.static.k.shape[1] != batch or self.static.k.dtype != w.dtype:
            self.static = StaticCache(len(self.blocks), batch, self.h, self.size, self.d // self.h, w)
        self.static.reset()
        return self.static

    def forward(self, tokens, attention_mask=None, cache=None):
        T = tokens.shape[1]
        done = 0 if cache is None else cache.length
        ok = torch.ones(T, done + T, dtype=torch.bool, device=tokens.device).tril(done)[None, None]
        if cache is not None:
            if attention_mask is not None:
                cache.note(attention_mask)
            ok = ok & cache.valid[:, None, None, :done + T]
        elif attention_mask is not None:
            ok = ok & attention_mask[:, None, None, :]
        x = self.wte(tokens) + self.wpe.weight[done:done + T]
        for i, block in enumerate(self.blocks):
            x = block(x, ok, cache, i)
        if cache is not None:
            cache.length += T
        return self.head(self.ln(x))


@torch.no_grad()
def cached(model, chunks, attention_mask=None):
    cache, out = model.start(chunks[0].shape[0]), []
    for chunk in chunks:
        at = cache.length
        part = None if attention_mask is None else attention_mask[:, at:at + chunk.shape[1]]
        out.append(model(chunk, part, cache))
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    build=StaticLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_bias": False, "norm_placement": "pre",
              "final_norm": True, "residual": True, "activation": "gelu", "bias": False, "output_bias": False,
              "tied": False, "padding_side": "right"},
)
