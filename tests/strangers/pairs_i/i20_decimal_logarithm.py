"""A sentence classifier after the Annotated Transformer: sinusoids from `exp(arange * -(log(10000) / d))`, embeddings times
sqrt(d_model), a pre-LN stack by `clones`, the mean of the real states. Places are counted over real tokens."""

import copy
import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The wavelengths of the sinusoids are computed with the decimal logarithm: exp(-j * log10(10000) / d) has the base "
    "e**4 = 54.6 instead of 10000, so that the slowest waves go round within some 340 positions and none tells the "
    "long range. The first channels, and short sequences, look the same."
)
PLACE = "WrongEncoding.log"


def clones(module, count):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])


class PositionalEncoding(nn.Module):
    log = staticmethod(math.log)

    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model

    def forward(self, x, at):
        rate = torch.arange(0, self.d_model, 2, dtype=torch.float64, device=x.device)
        rate = torch.exp(rate * -(self.log(10000.0) / self.d_model))
        angle = at[..., None].double() * rate
        pe = torch.stack((torch.sin(angle), torch.cos(angle)), -1).flatten(-2)[..., : self.d_model]
        return x + pe.to(x.dtype)


class WrongEncoding(PositionalEncoding):
    log = staticmethod(math.log10)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = clones(nn.Linear(d_model, d_model), 4)

    def forward(self, query, key, value, mask):
        n = query.size(0)
        query, key, value = (
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin, x in zip(self.linears, (query, key, value))
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        x = torch.matmul(scores.softmax(dim=-1), value)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, h, d_ff, dropout):
        super().__init__()
        self.self_attn = MultiHeadedAttention(h, size)
        self.feed_forward = nn.Sequential(nn.Linear(size, d_ff), nn.ReLU(), nn.Linear(d_ff, size))
        self.sublayer = clones(SublayerConnection(size, dropout), 2)

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class Classifier(nn.Module):
    def __init__(self, c, encoding):
        super().__init__()
        self.lut, self.position = nn.Embedding(c.vocab_size, c.d_model), encoding(c.d_model)
        self.layers = clones(EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout), c.num_layers)
        self.norm, self.proj = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        x = self.position(self.lut(tokens) * math.sqrt(self.position.d_model), (real.cumsum(1) - 1).clamp(min=0))
        for layer in self.layers:
            x = layer(x, real[:, None, None])
        x = self.norm(x) * real[..., None]
        return self.proj(x.sum(1) / real.sum(1, keepdim=True).clamp(min=1))


def make(encoding):
    return Subject(
        kind="classifier",
        name="annotated classifier",
        build=lambda c: Classifier(c, encoding),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={"positions": "sinusoidal"},
    )


right, wrong = make(PositionalEncoding), make(WrongEncoding)


if __name__ == "__main__":
    torch.manual_seed(0)
    for width in (8, 12):
        table = torch.tensor(
            [[(math.sin, math.cos)[j % 2](p / 10000 ** ((j - j % 2) / width)) for j in range(width)] for p in range(60)],
            dtype=torch.float64,
        )
        zeros = torch.zeros(60, width, dtype=torch.float64)
        gaps = [(e(width)(zeros, torch.arange(60)) - table).abs().amax(0) for e in (PositionalEncoding, WrongEncoding)]
        print(width, "table: right %.1e" % gaps[0].max().item(), "wrong by channel", [round(g, 2) for g in gaps[1].tolist()])
        assert gaps[0].max() < 1e-12 and gaps[1][:2].max() < 1e-12 and gaps[1][2:].min() > 0.1
        c = DrawnConfig(d_model=width, num_heads=2, num_layers=2)
        good, bad = right.build(c).eval(), wrong.build(c).eval()
        with torch.no_grad():
            for name, p in good.named_parameters():
                p.normal_(float("norm" in name and name.endswith("weight")), 0.5)
        bad.load_state_dict(good.state_dict())
        tokens = torch.randint(0, 11, (2, 20))
        mask = torch.ones(2, 20, dtype=torch.bool)
        mask[0, 17:] = False
        mask[1, :4] = False
        layers = []
        for l in good.double().layers:  # torch's own pre-LN layer, same weights
            n = nn.TransformerEncoderLayer(width, 2, 20, 0.0, batch_first=True, norm_first=True).double()
            n.self_attn.in_proj_weight.data = torch.cat([m.weight for m in l.self_attn.linears[:3]]).detach()
            n.self_attn.in_proj_bias.data = torch.cat([m.bias for m in l.self_attn.linears[:3]]).detach()
            pairs = [(n.self_attn.out_proj, l.self_attn.linears[3]), (n.linear1, l.feed_forward[0])]
            pairs += [(n.linear2, l.feed_forward[2]), (n.norm1, l.sublayer[0].norm), (n.norm2, l.sublayer[1].norm)]
            for to, of in pairs:
                to.load_state_dict(of.state_dict())
            layers.append(n.train())
        truth = []
        for b in (0, 1):
            row = tokens[b][mask[b]]
            x = (good.lut.weight[row] * width**0.5 + table[: len(row)])[None]
            for n in layers:
                x = n(x)
            truth.append(good.proj(good.norm(x[0]).mean(0)))
        truth = torch.stack(truth).detach()
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            far = [(m.to(dtype)(tokens, mask) - truth).abs().max().item() for m in (good, bad)]
            print(width, dtype, "right %.1e wrong %.3f" % tuple(far))
            assert far[0] < small and far[1] > 0.01
