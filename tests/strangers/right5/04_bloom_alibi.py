WHAT = "BLOOM: LayerNorm on the embedding, ALiBi with slopes for any number of heads, bias given by key positions alone (counted from the mask), fused QKV head by head"
import math

import torch
from torch import nn


def slopes(heads):
    closest = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(closest) - 3)))
    out = [base**i for i in range(1, closest + 1)]
    if closest != heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * closest) - 3)))
        out += [extra**i for i in range(1, 2 * (heads - closest) + 1, 2)]
    return out


class Block(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h = h
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down, self.p = nn.Linear(d, ff), nn.Linear(ff, d), nn.Dropout(p)

    def forward(self, x, alibi, seen):
        B, T, D = x.shape
        K = D // self.h
        fused = self.query_key_value(self.input_layernorm(x)).view(B, T, self.h, 3, K)
        q = fused[..., 0, :].permute(0, 2, 1, 3).reshape(B * self.h, T, K)
        k = fused[..., 1, :].permute(0, 2, 3, 1).reshape(B * self.h, K, T)
        v = fused[..., 2, :].permute(0, 2, 1, 3).reshape(B * self.h, T, K)
        scores = torch.baddbmm(alibi.to(q.dtype), q, k, beta=1.0, alpha=1.0 / math.sqrt(K)).view(B, self.h, T, T)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        w = wide.masked_fill(~seen, torch.finfo(wide.dtype).min).softmax(-1).to(x.dtype)
        y = torch.bmm(self.p(w).view(B * self.h, T, T), v).view(B, self.h, T, K).transpose(1, 2).reshape(B, T, D)
        x = x + self.p(self.dense(y))
        h = self.up(self.post_attention_layernorm(x))
        h = h * 0.5 * (1.0 + torch.tanh(0.79788456 * h * (1 + 0.044715 * h * h)))
        return x + self.p(self.down(h))


class Bloom(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.word_embeddings, self.word_embeddings_layernorm = nn.Embedding(vocab, d), nn.LayerNorm(d)
        self.h = nn.ModuleList(Block(d, h, ff, p) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.heads = h

    def forward(self, ids, mask=None):
        B, T = ids.shape
        seen = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()[None, None]
        if mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=ids.device)
        seen = seen & mask[:, None, None]
        m = torch.tensor(slopes(self.heads), device=ids.device, dtype=torch.float64)
        place = ((mask.long().cumsum(-1) - 1) * mask)[:, None, None, :]
        alibi = (m[None, :, None, None] * place).reshape(B * self.heads, 1, T)
        x = self.word_embeddings_layernorm(self.word_embeddings(ids))
        for block in self.h:
            x = block(x, alibi, seen)
        return torch.nn.functional.linear(self.ln_f(x), self.word_embeddings.weight)


from veriformer.properties import Subject


def build(c):
    return Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="bloom", build=build, forward=forward,
    declares={"positions": "alibi", "norm": "layer", "norm_placement": "pre", "final_norm": True, "tied": True,
              "activation": "gelu_tanh", "bias": True, "output_bias": False, "padding_side": "both", "beyond_max_len": "works"},
)
