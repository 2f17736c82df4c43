WHAT = 'Position ids of a left-padded batch are shifted by the padding of the longest-padded sample of the batch, not of each sample (line 38)'
import math
import torch
from torch import nn
from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, bias):
        b, t, d = x.shape
        y = self.ln1(x)
        q, k, v = (w(y).reshape(b, t, self.h, d // self.h).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        p = torch.softmax(torch.matmul(q, k.mT) / math.sqrt(d // self.h) + bias, -1)
        x = x + self.wo(torch.matmul(p, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class LeftGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, ids, mask=None):
        b, t = ids.shape
        seen = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()[None]
        position_ids = torch.arange(t, device=ids.device).expand(b, t)
        if mask is not None:
            seen = seen & mask[:, None, :].bool()
            pad_len = mask.int().argmax(-1).amax()
            position_ids = (position_ids - pad_len).clamp(min=0)
        x = self.wte(ids) + self.wpe(position_ids)
        bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)[:, None]
        for layer in self.layers:
            x = layer(x, bias)
        return torch.nn.functional.linear(self.ln_f(x), self.wte.weight)


subject = Subject(
    kind="decoder", name="left gpt", build=LeftGPT, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"positions": "learned", "padding_side": "both", "tied": True, "norm_placement": "pre", "norm": "layer",
              "final_norm": True, "activation": "gelu"},
)
