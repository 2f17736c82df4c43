import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.dh = h, d // h
        self.wq, self.wk, self.wv, self.wo = [nn.Linear(d, d) for _ in range(4)]

    def forward(self, x, past=None):
        B, T, D = x.shape
        q = self.wq(x).view(B, T, self.h, self.dh).transpose(1, 2)
        k = self.wk(x).view(B, T, self.h, self.dh).transpose(1, 2)
        v = self.wv(x).view(B, T, self.h, self.dh).transpose(1, 2)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        S = k.size(2)
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(diagonal=S - T)
        w = (q @ k.transpose(-1, -2)) / self.dh ** 0.5
        w = w.masked_fill(~mask, float("-inf")).softmax(-1)
        y = (w @ v).transpose(1, 2).reshape(B, T, D)
        return self.wo(y), (k, v)


class DecoderLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = CachedAttention(d, h)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, past=None):
        a, present = self.attn(self.n1(x), past)
        x = x + a
        return x + self.ff(self.n2(x)), present


class DecoderLM(nn.Module):
    def __init__(self, vocab=96, d=48, h=4, n_layers=2, n_ctx=128):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(n_ctx, d)
        self.layers = nn.ModuleList([DecoderLayer(d, h) for _ in range(n_layers)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids, past_key_values=None):
        past_len = 0 if past_key_values is None else past_key_values[0][0].size(2)
        pos = torch.arange(past_len, past_len + ids.size(1), device=ids.device)
        x = self.wte(ids) + self.wpe(pos)
        presents = []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, None if past_key_values is None else past_key_values[i])
            presents.append(kv)
        return self.head(self.norm(x)), presents

    @torch.no_grad()
    def generate(self, ids, steps):
        """Greedy continuation; the prompt is run once, then one token at a time."""
        logits, cache = self(ids)
        for _ in range(steps):
            nxt = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, nxt], dim=1)
            logits, cache = self(nxt, cache)
        return ids
