"""Translation with einsum attention and greedy decoding into a buffer."""
import torch
from torch import nn

from veriformer.properties import Subject

START = 1


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        def weight(*shape):
            return nn.Parameter(torch.randn(*shape) * d**-0.5)
        self.q, self.k, self.v, self.o = weight(h, d, d // h), weight(h, d, d // h), weight(h, d, d // h), weight(h, d // h, d)

    def forward(self, x, y, causal=False):
        q = torch.einsum("btd,hdk->bhtk", x, self.q)
        k = torch.einsum("bsd,hdk->bhsk", y, self.k)
        v = torch.einsum("bsd,hdk->bhsk", y, self.v)
        s = torch.einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
        if causal:
            T = x.shape[1]
            s = s + torch.full((T, T), float("-inf"), dtype=s.dtype, device=s.device).triu(1)
        return torch.einsum("bhts,bhsk,hkd->btd", s.softmax(-1), v, self.o)


class Layer(nn.Module):
    def __init__(self, d, h, d_ff, cross):
        super().__init__()
        self.a, self.na = Attention(d, h), nn.LayerNorm(d)
        self.cross = cross
        if cross:
            self.c, self.nc = Attention(d, h), nn.LayerNorm(d)
        self.f, self.nf = nn.Sequential(nn.Linear(d, d_ff), nn.ReLU(), nn.Linear(d_ff, d)), nn.LayerNorm(d)

    def forward(self, x, memory=None):
        x = self.na(x + self.a(x, x, causal=self.cross))
        if self.cross:
            x = self.nc(x + self.c(x, memory))
        return self.nf(x + self.f(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, h, n, d_ff, max_len):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.encoder = nn.ModuleList(Layer(d, h, d_ff, False) for _ in range(n))
        self.decoder = nn.ModuleList(Layer(d, h, d_ff, True) for _ in range(n))
        self.head = nn.Linear(d, vocab)

    def encode(self, source):
        x = self.emb(source) + self.pos.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, target, memory):
        x = self.emb(target) + self.pos.weight[: target.shape[1]]
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)

    def forward(self, source, target):
        return self.decode(target, self.encode(source))

    @torch.no_grad()
    def translate(self, source, steps):
        memory = self.encode(source)
        out = torch.zeros(source.shape[0], steps + 1, dtype=torch.long, device=source.device)
        out[:, 0] = START
        for i in range(steps):
            logits = self.decode(out, memory)
            out[:, i + 1] = logits[:, i].argmax(dim=-1)
        return out


subject = Subject(
    kind="encoder_decoder",
    name="greedy translator",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, source, target: model(source, target),
    generate=lambda model, tokens, steps, use_cache=False: model.translate(tokens, steps),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "relu"},
)
