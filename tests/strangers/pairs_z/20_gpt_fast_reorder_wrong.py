WHAT = "beams are reordered in place one after the other, self.k_cache[b] = self.k_cache[src]: a row that was overwritten is read again as the source of a later one (line 24)."
"""In the manner of gpt-fast: a static cache that is written in place, input_pos, beams reordered within the buffers."""
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import functional as F

from veriformer.properties import Subject


class KVCache(nn.Module):
    def __init__(self, max_batch_size, max_seq_length, n_heads, head_dim, like):
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=like.dtype, device=like.device), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=like.dtype, device=like.device), persistent=False)

    def update(self, input_pos, k_val, v_val):
        self.k_cache[:, :, input_pos] = k_val
        self.v_cache[:, :, input_pos] = v_val
        return self.k_cache, self.v_cache

    def reorder(self, beams: Tensor, filled: int):
        for row, beam in enumerate(beams.tolist()):
            self.k_cache[row, :, :filled] = self.k_cache[beam, :, :filled]
            self.v_cache[row, :, :filled] = self.v_cache[beam, :, :filled]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps) * self.weight


def apply_rotary_emb(x: Tensor, input_pos: Tensor, base: float = 10000.0) -> Tensor:
    """x [B, T, H, K], pairs of neighbours."""
    n_elem = x.shape[-1]
    freqs = 1.0 / (base ** (torch.arange(0, n_elem, 2, dtype=x.dtype, device=x.device) / n_elem))
    freqs = torch.outer(input_pos.to(x.dtype), freqs)[None, :, None, :]
    xshaped = x.reshape(*x.shape[:-1], -1, 2)
    return torch.stack(
        [
            xshaped[..., 0] * freqs.cos() - xshaped[..., 1] * freqs.sin(),
            xshaped[..., 1] * freqs.cos() + xshaped[..., 0] * freqs.sin(),
        ],
        -1,
    ).flatten(3)


class Attention(nn.Module):
    def __init__(self, dim, n_head, n_local_heads):
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim, self.dim = n_head, n_local_heads, dim // n_head, dim
        if self.head_dim % 2:
            raise ValueError("odd head_dim")
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.kv_cache = None

    def forward(self, x, mask, input_pos, cached):
        bsz, seqlen, _ = x.shape
        kv_size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.dim, kv_size, kv_size], dim=-1)
        q = apply_rotary_emb(q.view(bsz, seqlen, self.n_head, self.head_dim), input_pos)
        k = apply_rotary_emb(k.view(bsz, seqlen, self.n_local_heads, self.head_dim), input_pos)
        v = v.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cached:
            k, v = self.kv_cache.update(input_pos, k, v)
        k = k.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).reshape(bsz, seqlen, self.dim))


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_head, n_local_heads, intermediate_size):
        super().__init__()
        self.attention = Attention(dim, n_head, n_local_heads)
        self.w1 = nn.Linear(dim, intermediate_size, bias=False)
        self.w3 = nn.Linear(dim, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, dim, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, mask, input_pos, cached):
        h = x + self.attention(self.attention_norm(x), mask, input_pos, cached)
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n))


class Transformer(nn.Module):
    def __init__(self, vocab_size, dim, n_head, n_local_heads, n_layer, intermediate_size, block_size):
        super().__init__()
        self.block_size = block_size
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(
            TransformerBlock(dim, n_head, n_local_heads, intermediate_size) for _ in range(n_layer)
        )
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def setup_caches(self, max_batch_size):
        for block in self.layers:
            attention = block.attention
            attention.kv_cache = KVCache(
                max_batch_size, self.block_size, attention.n_local_heads, attention.head_dim, self.output.weight
            )

    def forward(self, idx, input_pos=None):
        cached = input_pos is not None
        if not cached:
            input_pos = torch.arange(idx.shape[1], device=idx.device)
        columns = torch.arange(self.block_size if cached else idx.shape[1], device=idx.device)
        mask = columns[None, :] <= input_pos[:, None]
        x = self.tok_embeddings(idx)
        for layer in self.layers:
            x = layer(x, mask, input_pos, cached)
        return self.output(self.norm(x))


@torch.no_grad()
def cache(model, chunks, reorder=None):
    model.setup_caches(chunks[0].shape[0])
    filled, outputs = 0, []
    for number, chunk in enumerate(chunks):
        input_pos = torch.arange(filled, filled + chunk.shape[1], device=chunk.device)
        outputs.append(model(chunk, input_pos))
        filled += chunk.shape[1]
        if number == 0 and reorder is not None:
            for block in model.layers:
                block.attention.kv_cache.reorder(torch.as_tensor(reorder, device=chunk.device), filled)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="gpt-fast",
    build=lambda c: Transformer(
        c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff, c.max_len
    ),
    forward=lambda m, tokens: m(tokens),
    cache=cache,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
    },
)
