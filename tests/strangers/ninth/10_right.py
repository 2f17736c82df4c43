"""GPT with a key/value cache.

`forward(idx)` gives logits for the whole sequence; with `use_cache=True` it also gives the keys and
values of every layer, and a later call with `past` takes only the tokens that are new. `generate`
runs the prompt once and then one token at a time, and is equal to decoding without a cache.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedAttention(nn.Module):
    def __init__(self, d_model, n_heads, dropout):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = dropout

    def forward(self, x, past=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = k.view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = v.view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        total = k.size(2)
        rows = torch.arange(total - t, total, device=x.device).unsqueeze(1)
        cols = torch.arange(total, device=x.device).unsqueeze(0)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=cols <= rows, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(y.transpose(1, 2).reshape(b, t, d)), (k, v)


class Block(nn.Module):
    def __init__(self, d_model, n_heads, dropout):
        super().__init__()
        self.ln1 = nn.LayerNorm(d_model)
        self.attn = CachedAttention(d_model, n_heads, dropout)
        self.ln2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model), nn.Dropout(dropout)
        )

    def forward(self, x, past=None):
        a, present = self.attn(self.ln1(x), past)
        x = x + a
        return x + self.mlp(self.ln2(x)), present


class CachedGPT(nn.Module):
    def __init__(self, vocab_size=100, d_model=64, n_heads=4, n_layers=2, max_len=64, dropout=0.0):
        super().__init__()
        self.max_len = max_len
        self.tok = nn.Embedding(vocab_size, d_model)
        self.pos = nn.Embedding(max_len, d_model)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(d_model, n_heads, dropout) for _ in range(n_layers)])
        self.ln_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, idx, past=None, use_cache=False):
        offset = 0 if past is None else past[0][0].size(2)
        pos = torch.arange(offset, offset + idx.size(1), device=idx.device)
        x = self.drop(self.tok(idx) + self.pos(pos))
        presents = []
        for i, block in enumerate(self.blocks):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        logits = self.head(self.ln_f(x))
        if use_cache:
            return logits, presents
        return logits

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, do_sample=False, temperature=1.0):
        past = None
        step = idx
        for _ in range(max_new_tokens):
            logits, past = self(step, past=past, use_cache=True)
            logits = logits[:, -1] / temperature
            if do_sample:
                nxt = torch.multinomial(logits.softmax(dim=-1), 1)
            else:
                nxt = logits.argmax(dim=-1, keepdim=True)
            idx = torch.cat([idx, nxt], dim=1)
            step = idx[:, -1:]
        return idx
