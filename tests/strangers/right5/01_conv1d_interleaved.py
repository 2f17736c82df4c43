WHAT = "weights stored [in, out] (Conv1D), fused QKV laid out head by head (q k v q k v ...), gradient checkpointing in train mode"
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Conv1D(nn.Module):
    def __init__(self, n_in, n_out, std=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * std)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self, d, h, ff, layers, p):
        super().__init__()
        self.h = h
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        small = 0.02 / math.sqrt(2 * layers)
        self.c_attn, self.c_proj = Conv1D(d, 3 * d), Conv1D(d, d, small)
        self.c_fc, self.c_out = Conv1D(d, ff), Conv1D(ff, d, small)
        self.drop = nn.Dropout(p)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x, allowed):
        B, T, D = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(B, T, self.h, 3, D // self.h)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
        w = q.matmul(k.transpose(2, 3)) * (D // self.h) ** -0.5
        w = w.masked_fill(~allowed, torch.finfo(w.dtype).min)
        y = self.drop(w.softmax(-1)).matmul(v).transpose(1, 2).reshape(B, T, D)
        x = x + self.drop(self.c_proj(y))
        return x + self.drop(self.c_out(self.act(self.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, p):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList(Block(d, h, ff, layers, p) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)

    def forward(self, ids, mask=None):
        T = ids.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        x = self.drop(self.wte(ids) + self.wpe.weight[self._positions(T, ids.device)])
        for block in self.blocks:
            if self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, allowed, use_reentrant=False)
            else:
                x = block(x, allowed)
        return self.ln_f(x) @ self.wte.weight.t()

    def _positions(self, T, device):
        if T > self.wpe.num_embeddings:
            raise ValueError(f"{T} tokens, but the table has {self.wpe.num_embeddings}")
        return torch.arange(T, device=device)


from veriformer.properties import Subject


def build(c):
    return GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="conv1d gpt", build=build, forward=forward,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "tied": True,
              "activation": "gelu_tanh", "bias": True, "output_bias": False, "init": "gpt2", "padding_side": "right",
              "beyond_max_len": "error", "attention_scale": "1/sqrt(d_head)"},
)
