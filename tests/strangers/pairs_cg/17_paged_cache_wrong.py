"""Paged attention: keys and values lie in a pool of blocks, a table says which blocks belong to a sequence, in order."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 4


class Pool:
    """One layer's keys and values: [blocks, BLOCK, heads, width]."""

    def __init__(self, blocks, heads, width, like):
        self.k = like.new_zeros(blocks, BLOCK, heads, width)
        self.v = like.new_zeros(blocks, BLOCK, heads, width)

    def write(self, table, positions, k, v):
        where = (table[:, positions // BLOCK], (positions % BLOCK).expand(len(table), -1))
        self.k, self.v = self.k.index_put(where, k), self.v.index_put(where, v)

    def read(self, table, context_len):
        used = table[:, : -(-context_len // BLOCK)]
        k, v = self.k[used].flatten(1, 2), self.v[used].flatten(1, 2)
        return k, v


class PagedBlock(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv_proj, self.o_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, positions, pool=None, table=None):
        B, T, D = x.shape
        q, k, v = self.qkv_proj(self.input_layernorm(x)).view(B, T, 3, self.heads, -1).unbind(2)
        if pool is not None:
            pool.write(table, positions, k, v)
            k, v = pool.read(table, int(positions[-1]) + 1)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        s = q @ k.transpose(2, 3) / (D // self.heads) ** 0.5
        if T > 1:  # prefill; a single query sees all that lies before it
            ahead = torch.arange(k.shape[2], device=x.device) > positions[:, None]
            s = s.masked_fill(ahead, float("-inf"))
        x = x + self.o_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(self.post_layernorm(x))))


class PagedGPT(nn.Module):
    def __init__(self, vocab, d, heads, layers, ff, max_len):
        super().__init__()
        self.heads = heads
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(PagedBlock(d, heads, ff) for _ in range(layers))
        self.final_layernorm, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def run(self, tokens, start=0, pools=None, table=None):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, None if pools is None else pools[i], table)
        return self.lm_head(self.final_layernorm(x))

    def serve(self, chunks):
        batch, total = len(chunks[0]), sum(chunk.shape[1] for chunk in chunks)
        each = -(-total // BLOCK)
        free = torch.arange(batch * each, device=chunks[0].device).flip(0)
        table = free.view(each, batch).T.contiguous()  # blocks of the sequences lie among one another
        like = self.lm_head.weight
        pools = [Pool(batch * each, self.heads, like.shape[1] // self.heads, like.detach()) for _ in self.layers]
        outputs, start = [], 0
        for chunk in chunks:
            outputs.append(self.run(chunk, start, pools, table))
            start += chunk.shape[1]
        return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="paged GPT",
    build=lambda c: PagedGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m.run(tokens),
    cache=lambda m, chunks: m.serve(chunks),
    declares={"positions": "learned", "norm_placement": "pre"},
)
WHAT = 'What is read from the pool is not cut to the length of the context (line 25): a single cached step, which takes no mask, gives weight to the slots of the last block that nothing was written to.'
