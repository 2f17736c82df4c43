import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def rotate(x, pos):
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) * 2 / (2 * half))
    ang = pos.to(torch.float64)[:, None] * freq
    cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class KVBuffer:
    """One preallocated [B, H, max_len, K] for keys and one for values of every layer."""

    def __init__(self, layers, batch, heads, max_len, width, like):
        shape = (batch, heads, max_len, width)
        self.k = [like.new_zeros(shape) for _ in range(layers)]
        self.v = [like.new_zeros(shape) for _ in range(layers)]
        self.length = 0

    def append(self, i, k, v):
        end = self.length + k.shape[2]
        self.k[i][:, :, self.length : end] = k
        self.v[i][:, :, self.length : end] = v
        return self.k[i][:, :, :end], self.v[i][:, :, :end]

    def reorder_(self, beams):
        for buf in self.k + self.v:
            old = buf.clone()
            for b, src in enumerate(beams.tolist()):
                buf[b] = old[src]


class Block(nn.Module):
    def __init__(self, d, h, ff, i):
        super().__init__()
        self.h, self.i = h, i
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, mask=None, cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        past = 0 if cache is None else cache.length
        pos = torch.arange(past, past + T, device=x.device)
        q, k = rotate(q, pos), rotate(k, pos)
        if cache is not None:
            k, v = cache.append(self.i, k, v)
        keys = torch.arange(k.shape[2], device=x.device)
        allowed = keys <= pos[:, None]
        if mask is not None:
            allowed = (allowed & mask[:, None, None, :]) | (keys == pos[:, None])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        if (d // h) % 2:
            raise ValueError("rotary needs an even width of a head")
        self.max_len = max_len
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, h, ff, i) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, mask=None, cache=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.head(self.norm(x))

    @torch.no_grad()
    def decode(self, chunks, reorder=None):
        total, h = sum(c.shape[1] for c in chunks), self.blocks[0].h
        w = self.embed.weight
        cache = KVBuffer(len(self.blocks), chunks[0].shape[0], h, max(total, self.max_len), w.shape[1] // h, w)
        outputs = []
        for n, chunk in enumerate(chunks):
            outputs.append(self(chunk, cache=cache))
            if n == 0 and reorder is not None:
                cache.reorder_(torch.as_tensor(reorder))
        return outputs


subject = Subject(
    kind="decoder",
    name="beam decoder",
    build=lambda c: LM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=lambda m, chunks, reorder=None: m.decode(chunks, reorder),
    declares={"positions": "rotary", "layout": "halves", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)
