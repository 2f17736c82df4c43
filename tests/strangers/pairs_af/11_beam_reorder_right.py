"""A decoder with a preallocated cache that beam search reorders in place."""
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from veriformer.properties import Subject


class KVCache:
    """Buffers of full length for one layer, filled up to `end`."""

    def __init__(self, batch: int, heads: int, max_len: int, head_dim: int, like: Tensor):
        self.k = like.new_zeros(batch, heads, max_len, head_dim)
        self.v = like.new_zeros(batch, heads, max_len, head_dim)
        self.end = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        new = self.end + k.size(2)
        self.k[:, :, self.end : new] = k
        self.v[:, :, self.end : new] = v
        self.end = new
        return self.k[:, :, :new], self.v[:, :, :new]

    def reorder(self, beams: Tensor) -> None:
        for buffer in (self.k, self.v):
            buffer.copy_(buffer.index_select(0, beams))


class Block(nn.Module):
    def __init__(self, dim: int, n_head: int, d_ff: int):
        super().__init__()
        self.n_head = n_head
        self.attention_norm = nn.LayerNorm(dim)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, d_ff, bias=False)
        self.w2 = nn.Linear(d_ff, dim, bias=False)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        bsz, seqlen, dim = x.shape
        qkv = self.wqkv(self.attention_norm(x)).view(bsz, seqlen, 3, self.n_head, dim // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.append(k, v)
        mask = torch.ones(seqlen, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - seqlen)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.wo(y.transpose(1, 2).reshape(bsz, seqlen, dim))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocab: int, dim: int, n_head: int, n_layer: int, d_ff: int, max_len: int):
        super().__init__()
        self.n_head, self.max_len = n_head, max_len
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(Block(dim, n_head, d_ff) for _ in range(n_layer))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        start = caches[0].end if caches else 0
        positions = torch.arange(start, start + idx.size(1), device=idx.device)
        x = self.tok_embeddings(idx) + self.pos_embeddings(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[i] if caches else None)
        return self.output(self.norm(x))

    @torch.no_grad()
    def decode(self, chunks: list[Tensor], reorder: Tensor | None = None) -> Tensor:
        weight = self.output.weight
        head_dim = weight.size(1) // self.n_head
        caches = [KVCache(chunks[0].size(0), self.n_head, self.max_len, head_dim, weight) for _ in self.layers]
        outputs = []
        for step, chunk in enumerate(chunks):
            if step == 1 and reorder is not None:
                for cache in caches:
                    cache.reorder(torch.as_tensor(reorder, device=weight.device))
            outputs.append(self(chunk, caches))
        return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="beam",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=lambda m, chunks, reorder=None: m.decode(chunks, reorder),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
    },
)
