WHAT = "outputs are log-probabilities of an adaptive softmax; factorised embedding; every layer has learned prefix keys and values that all queries see; sinusoids in a table that grows on demand"
import torch
from torch import nn

PREFIX = 2


class Block(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h = h
        self.prefix = nn.Parameter(torch.randn(2, h, PREFIX, d // h) * 0.5)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.up, self.down, self.drop = nn.Linear(d, ff), nn.Linear(ff, d), nn.Dropout(p)

    def forward(self, x, seen):
        B, T, D = x.shape
        n = self.n1(x)
        q = self.q(n).view(B, T, self.h, -1).transpose(1, 2)
        k, v = self.kv(n).view(B, T, 2, self.h, -1).permute(2, 0, 3, 1, 4)
        pk, pv = self.prefix.unsqueeze(1).expand(-1, B, -1, -1, -1)
        k, v = torch.cat([pk, k], 2), torch.cat([pv, v], 2)
        s = (q * q.shape[-1] ** -0.5) @ k.mT
        s = torch.where(seen, s, -float("inf"))  # never a whole row: the prefix is always seen
        x = x + self.drop(self.o((self.drop(s.softmax(-1)) @ v).transpose(1, 2).reshape(B, T, D)))
        return x + self.drop(self.down(torch.relu(self.up(self.n2(x)))))


class Model(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.d = d
        rank = max(2, d // 2)
        self.small, self.project = nn.Embedding(vocab, rank), nn.Linear(rank, d, bias=False)
        self.blocks = nn.ModuleList(Block(d, h, ff, p) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.out = nn.AdaptiveLogSoftmaxWithLoss(d, vocab, [vocab // 3, 2 * vocab // 3], div_value=2.0, head_bias=True)
        self._table = None

    def sinusoid(self, T, like):
        have = self._table
        if have is None or have.shape[0] < T or have.device != like.device:
            with torch.inference_mode(False), torch.no_grad():
                t = torch.arange(max(T, 16), device=like.device, dtype=torch.float64)[:, None]
                i = torch.arange(0, self.d, 2, device=like.device, dtype=torch.float64)
                a = t * torch.exp(-torch.log(torch.tensor(10000.0, dtype=torch.float64, device=like.device)) * i / self.d)
                self._table = torch.cat([a.sin(), a.cos()[:, : self.d // 2]], -1)
        return self._table.to(like.dtype)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        if mask is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
        place = (mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.project(self.small(ids))
        x = x + self.sinusoid(T, x)[place]
        seen = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril() & mask[:, None, :]
        seen = nn.functional.pad(seen, (PREFIX, 0), value=True)[:, None]
        for block in self.blocks:
            x = block(x, seen)
        return self.out.log_prob(self.norm(x).reshape(-1, self.d)).view(B, T, -1)


from veriformer.properties import Subject


def build(c):
    return Model(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="adaptive softmax", build=build, forward=forward,
    declares={"positions": "sinusoidal", "layout": "halves", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "relu", "tied": False, "structure": "other", "padding_side": "both", "beyond_max_len": "works"},
)
