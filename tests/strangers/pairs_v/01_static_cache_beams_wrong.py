WHAT = "When beams are reordered the rows of the static buffers are copied one by one in place, so that a row that was already overwritten is read as if it were the old one (line 28)."
"""Decoder whose key-value cache is a pair of static buffers, allocated once for a generation."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class StaticCache:
    """Buffers [B, H, max_len, K] of every layer; nothing is concatenated, nothing is allocated while decoding."""

    def __init__(self, layers, batch, heads, max_len, width, like):
        self.keys = [like.new_zeros(batch, heads, max_len, width) for _ in range(layers)]
        self.values = [like.new_zeros(batch, heads, max_len, width) for _ in range(layers)]
        self.filled = 0

    def write(self, layer, keys, values):
        end = self.filled + keys.shape[2]
        self.keys[layer][:, :, self.filled : end] = keys
        self.values[layer][:, :, self.filled : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def reorder(self, beams):
        """Row b goes on as row beams[b]; the buffers keep their addresses (CUDA graphs)."""
        for buffer in (*self.keys, *self.values):
            for row, beam in enumerate(beams.tolist()):
                buffer[row].copy_(buffer[beam])


def rotate(x, positions):
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = positions[:, None].double() * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff, index):
        super().__init__()
        self.heads, self.index = heads, index
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def attend(self, x, allowed, start, cache):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        positions = torch.arange(start, start + length, device=x.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            k, v = cache.write(self.index, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, allowed, start, cache):
        x = x + self.attend(self.norm_1(x), allowed, start, cache)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("rotary positions need heads of even width")
        self.heads, self.max_len = c.num_heads, c.max_len
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, i) for i in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, cache=None):
        start = 0 if cache is None else cache.filled
        length, seen = tokens.shape[1], start + tokens.shape[1]
        rows = torch.arange(start, seen, device=tokens.device)[:, None]
        columns = torch.arange(seen, device=tokens.device)[None]
        allowed = (columns <= rows)[None, None]
        if attention_mask is not None:  # a padding token sees itself, so that no row is empty
            allowed = allowed & attention_mask[:, None, None, :seen] | (columns == rows)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, allowed, start, cache)
        if cache is not None:
            cache.filled += length
        return self.head(self.norm(x))


@torch.no_grad()
def cached(model, chunks, attention_mask=None, reorder=None):
    like = model.head.weight
    width = like.shape[1] // model.heads
    cache = StaticCache(len(model.blocks), chunks[0].shape[0], model.heads, model.max_len, width, like)
    outputs = []
    for number, chunk in enumerate(chunks):
        if number == 1 and reorder is not None:
            beams = torch.as_tensor(reorder, device=like.device)
            cache.reorder(beams)
            attention_mask = None if attention_mask is None else attention_mask[beams]
        outputs.append(model(chunk, attention_mask, cache))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="decoder with static cache",
    build=Decoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=cached,
    declares={"positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre", "padding_side": "both"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long)).shape)
