"""gpt-fast-like: the cache is allocated once, for all positions, and written in place."""
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from veriformer.properties import Subject


class KVCache(nn.Module):
    def __init__(self, max_batch_size, max_seq_length, n_heads, head_dim, dtype=torch.bfloat16):
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor):
        self.k_cache[:, :, input_pos] = k.to(self.k_cache.dtype)
        self.v_cache[:, :, input_pos] = v.to(self.v_cache.dtype)
        return self.k_cache.to(k.dtype), self.v_cache.to(v.dtype)


class Attention(nn.Module):
    def __init__(self, dim, n_head):
        super().__init__()
        self.n_head, self.head_dim = n_head, dim // n_head
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.kv_cache = None

    def forward(self, x: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        bsz, seqlen, dim = x.shape
        q, k, v = (z.view(bsz, seqlen, self.n_head, self.head_dim).transpose(1, 2) for z in self.wqkv(x).chunk(3, -1))
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(input_pos, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(bsz, seqlen, dim))


class Block(nn.Module):
    def __init__(self, dim, n_head, hidden):
        super().__init__()
        self.attention = Attention(dim, n_head)
        self.w1, self.w2, self.w3 = (nn.Linear(*s, bias=False) for s in ((dim, hidden), (hidden, dim), (dim, hidden)))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x, mask, input_pos):
        h = x + self.attention(self.attention_norm(x), mask, input_pos)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.output = nn.RMSNorm(c.d_model, eps=1e-5), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def setup_caches(self, max_batch_size):
        weight = self.output.weight
        for b in self.layers:
            b.attention.kv_cache = KVCache(
                max_batch_size, self.c.max_len, self.c.num_heads, self.c.d_model // self.c.num_heads, dtype=weight.dtype
            ).to(weight.device)

    def drop_caches(self):
        for b in self.layers:
            b.attention.kv_cache = None

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        pos = torch.arange(idx.shape[1], device=idx.device) if input_pos is None else input_pos
        keys = pos if input_pos is None else torch.arange(self.c.max_len, device=idx.device)
        mask = keys[None, :] <= pos[:, None]
        x = self.tok_embeddings(idx) + self.pos_embeddings(pos)
        for layer in self.layers:
            x = layer(x, mask, pos)
        return self.output(self.norm(x))


@torch.no_grad()
def decode(model, chunks):
    model.setup_caches(chunks[0].shape[0])
    try:
        outputs, start = [], 0
        for chunk in chunks:
            outputs.append(model(chunk, torch.arange(start, start + chunk.shape[1], device=chunk.device)))
            start += chunk.shape[1]
        return torch.cat(outputs, 1)
    finally:
        model.drop_caches()


subject = Subject(
    kind="decoder",
    name="gpt-fast with learned positions",
    build=Transformer,
    forward=lambda m, tokens: m(tokens),
    cache=decode,
    declares={"positions": "learned", "norm": "rms", "norm_placement": "pre", "final_norm": True, "activation": "swiglu",
              "bias": False},
)
