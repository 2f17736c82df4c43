WHAT = "T5: no scale before the softmax, bucketed bias made by the first layer of each stack and used by all, none in cross-attention, norms in float32, logits times d_model ** -0.5 under a tied head"
import math

import torch
from torch import nn

BUCKETS, FAR = 8, 20


def bucket(relative, bidirectional):
    n, out = BUCKETS, torch.zeros_like(relative)
    if bidirectional:
        n //= 2
        out = out + (relative > 0).long() * n
        relative = relative.abs()
    else:
        relative = -torch.min(relative, torch.zeros_like(relative))
    exact = n // 2
    large = exact + (torch.log(relative.clamp(min=1).float() / exact) / math.log(FAR / exact) * (n - exact)).long()
    return out + torch.where(relative < exact, relative, large.clamp(max=n - 1))


class T5Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        variance = x.to(torch.promote_types(x.dtype, torch.float32)).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self, d, h, biased=False, bidirectional=True):
        super().__init__()
        self.h, self.bidirectional = h, bidirectional
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=(d * (d // h)) ** -0.5)
        for f in (self.k, self.v, self.o):
            nn.init.normal_(f.weight, std=d**-0.5)
        self.relative_attention_bias = nn.Embedding(BUCKETS, h) if biased else None

    def bias(self, T):
        at = torch.arange(T, device=self.q.weight.device)
        which = bucket(at[None, :] - at[:, None], self.bidirectional)
        return self.relative_attention_bias(which).permute(2, 0, 1)[None]

    def forward(self, x, y, bias, seen):
        q, k, v = self.q(x), self.k(y), self.v(y)
        q, k, v = (t.view(t.shape[0], t.shape[1], self.h, -1).transpose(1, 2) for t in (q, k, v))
        s = torch.matmul(q, k.transpose(3, 2))
        if bias is not None:
            s = s + bias
        s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
        w = s.to(torch.promote_types(s.dtype, torch.float32)).softmax(-1).to(s.dtype)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, h, ff, first, decoder, p):
        super().__init__()
        self.norm_a, self.self_attention = T5Norm(d), Attention(d, h, first, not decoder)
        self.norm_x, self.cross = (T5Norm(d), Attention(d, h)) if decoder else (None, None)
        self.norm_f, self.wi, self.wo = T5Norm(d), nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)
        self.drop = nn.Dropout(p)

    def forward(self, x, bias, seen, memory=None, memory_seen=None):
        n = self.norm_a(x)
        x = x + self.drop(self.self_attention(n, n, bias, seen))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.norm_x(x), memory, None, memory_seen))
        return x + self.drop(self.wo(self.drop(torch.relu(self.wi(self.norm_f(x))))))


class T5(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.d, self.shared = d, nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList(Block(d, h, ff, i == 0, False, p) for i in range(layers))
        self.decoder = nn.ModuleList(Block(d, h, ff, i == 0, True, p) for i in range(layers))
        self.encoder_norm, self.decoder_norm, self.drop = T5Norm(d), T5Norm(d), nn.Dropout(p)

    def forward(self, source, target, source_mask=None, target_mask=None):
        S, T = source.shape[1], target.shape[1]
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        seen = source_mask[:, None, None]
        x, bias = self.drop(self.shared(source)), self.encoder[0].self_attention.bias(S)
        for block in self.encoder:
            x = block(x, bias, seen)
        memory = self.drop(self.encoder_norm(x))
        past = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            past = past & target_mask[:, None, None]
        y, bias = self.drop(self.shared(target)), self.decoder[0].self_attention.bias(T)
        for block in self.decoder:
            y = block(y, bias, past, memory, seen)
        return (self.decoder_norm(y) * self.d**-0.5) @ self.shared.weight.T


from veriformer.properties import Subject


def build(c):
    return T5(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, source_mask, target_mask)


undeclared = Subject(kind="encoder_decoder", build=build, forward=forward)
declared = Subject(
    kind="encoder_decoder", name="t5", build=build, forward=forward,
    declares={"positions": "t5", "attention_scale": "1", "num_buckets": BUCKETS, "max_distance": FAR, "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "activation": "relu", "bias": False, "output_bias": False,
              "tied": True, "padding_side": "both", "beyond_max_len": "works"},
)
