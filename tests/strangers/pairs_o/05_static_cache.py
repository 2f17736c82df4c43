"""A Llama with a static key-value cache, in the manner of gpt-fast."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The static cache is allocated in bfloat16 whatever numbers the model computes in."
CAUSE = (
    "setup_caches leaves the cache its default dtype, bfloat16: keys and values of a float32 or float64 model are "
    "rounded to 8 bits when they are stored, and cached decoding departs from the forward by far more than rounding."
)


class KVCache(nn.Module):
    def __init__(self, batch: int, length: int, heads: int, head_dim: int, device, dtype=torch.bfloat16):
        super().__init__()
        shape = (batch, heads, length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor):
        self.k_cache[:, :, input_pos] = k.to(self.k_cache.dtype)
        self.v_cache[:, :, input_pos] = v.to(self.v_cache.dtype)
        return self.k_cache.to(k.dtype), self.v_cache.to(v.dtype)


def rope_table(length: int, head_dim: int) -> Tensor:
    freqs = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * freqs
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    cos, sin = table.to(x.dtype).unbind(-1)
    first = pairs[..., 0] * cos - pairs[..., 1] * sin
    second = pairs[..., 1] * cos + pairs[..., 0] * sin
    return torch.stack((first, second), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim: int, n_head: int, n_local: int):
        super().__init__()
        self.n_head, self.n_local, self.head_dim = n_head, n_local, dim // n_head
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.kv_cache = None

    def forward(self, x: Tensor, table: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.n_head, self.n_local, self.n_local], dim=1)
        q, k = rotate(q, table), rotate(k, table)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        groups = self.n_head // self.n_local
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, n_head: int, n_local: int, hidden: int):
        super().__init__()
        self.attention = Attention(dim, n_head, n_local)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x, table, mask, input_pos):
        h = x + self.attention(self.attention_norm(x), table, mask, input_pos)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, vocab, dim, n_layer, n_head, n_local, hidden, block_size):
        super().__init__()
        if dim // n_head % 2:
            raise ValueError("head_dim must be even")
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, n_head, n_local, hidden) for _ in range(n_layer))
        self.norm, self.output = nn.RMSNorm(dim, eps=1e-5), nn.Linear(dim, vocab, bias=False)
        self.head_dim, self.n_local, self.block_size = dim // n_head, n_local, block_size

    def cache_dtype(self):
        return {"dtype": self.output.weight.dtype}

    def setup_caches(self, batch: int, length: int):
        device = self.output.weight.device
        for block in self.layers:
            block.attention.kv_cache = KVCache(
                batch, length, self.n_local, self.head_dim, device, **self.cache_dtype()
            )

    def drop_caches(self):
        for block in self.layers:
            block.attention.kv_cache = None

    def forward(self, idx: Tensor, input_pos: Tensor | None = None, length: int | None = None) -> Tensor:
        if input_pos is None:
            input_pos, length = torch.arange(idx.shape[1], device=idx.device), idx.shape[1]
        table = rope_table(length, self.head_dim).to(idx.device)[input_pos]
        mask = input_pos[:, None] >= torch.arange(length, device=idx.device)
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, table, mask, input_pos)
        return self.output(self.norm(x))


class DefaultCacheTransformer(Transformer):
    def cache_dtype(self):
        return {}


@torch.no_grad()
def decode(model, chunks):
    length, at, outputs = sum(c.shape[1] for c in chunks), 0, []
    model.setup_caches(chunks[0].shape[0], length)
    try:
        for chunk in chunks:
            input_pos = torch.arange(at, at + chunk.shape[1], device=chunk.device)
            outputs.append(model(chunk, input_pos, length))
            at += chunk.shape[1]
    finally:
        model.drop_caches()
    return torch.cat(outputs, dim=1)


def llama(cls):
    return Subject(
        kind="decoder",
        build=lambda c: cls(
            c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.d_ff, c.max_len
        ),
        forward=lambda m, tokens: m(tokens),
        cache=decode,
        declares={"positions": "rotary", "layout": "interleaved", "norm": "rms", "activation": "swiglu", "bias": False},
    )


right, wrong = llama(Transformer), llama(DefaultCacheTransformer)
