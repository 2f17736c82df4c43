import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GrowingCache:
    """Buffers of keys and values [B, H, capacity, K] that double when they are full."""

    def __init__(self, capacity=4):
        self.capacity, self.length = capacity, 0
        self.buffers = None

    def update(self, k, v):
        if self.buffers is None:
            shape = (*k.shape[:2], self.capacity, k.shape[-1])
            self.buffers = [k.new_zeros(shape), v.new_zeros(shape)]
        end = self.length + k.shape[2]
        while end > self.capacity:
            self.buffers = [F.pad(b, (0, 0, 0, self.capacity)) for b in self.buffers]
            self.capacity *= 2
        for buffer, new in zip(self.buffers, (k, v)):
            buffer[:, :, self.length : end] = new
        self.length = end
        return [b[:, :, :end] for b in self.buffers]

    def reorder(self, index):
        self.buffers = [b.index_select(0, index) for b in self.buffers]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc_1, self.fc_2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v)
        S = k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.fc_2(F.gelu(self.fc_1(self.norm_2(x))))


class LM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, max_len):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, caches=None):
        past = 0 if caches is None else caches[0].length
        x = self.embed(tokens) + self.place.weight[past : past + tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(self.norm(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    caches = [GrowingCache() for _ in model.blocks]
    outputs = []
    for n, chunk in enumerate(chunks):
        outputs.append(model(chunk, caches))
        if n == 0 and reorder is not None:
            for cache in caches:
                cache.reorder(reorder)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="LM with a growing cache",
    build=lambda c: LM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "final_norm": True},
)
