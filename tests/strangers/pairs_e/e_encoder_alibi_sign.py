"""Encoder with ALiBi in both directions."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "The decoder's ALiBi, slope * (s - t), was kept for an encoder without the absolute value: later keys gain with their distance."
PLACE = "bias of distances added to the scores"


def both_ways(t):
    n = torch.arange(t)
    return -(n - n[:, None]).abs()


def one_way(t):
    n = torch.arange(t)
    return n - n[:, None]


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, distance):
        super().__init__()
        self.h, self.distance, self.emb = h, distance, nn.Embedding(vocab, d)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, h + 1) / h), persistent=False)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "qkv": nn.Linear(d, 3 * d), "o": nn.Linear(d, d), "up": nn.Linear(d, ff), "down": nn.Linear(ff, d),
            "n1": nn.LayerNorm(d), "n2": nn.LayerNorm(d)}) for _ in range(layers))
        self.final = nn.LayerNorm(d)

    def forward(self, ids, mask=None):
        x = self.emb(ids)
        bias = self.slopes.to(x.dtype)[:, None, None] * self.distance(ids.shape[1]).to(x)
        hide = torch.zeros_like(ids).bool() if mask is None else ~mask.bool()
        for m in self.layers:
            q, k, v = m["qkv"](m["n1"](x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            s = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(hide[:, None, None], torch.finfo(x.dtype).min)
            w = s.softmax(-1).masked_fill(hide[:, None, None], 0.0)
            x = x + m["o"]((w @ v).transpose(1, 2).flatten(2))
            x = x + m["down"](F.relu(m["up"](m["n2"](x))))
        return self.final(x)


def subject(distance):
    return Subject(kind="encoder", mask_forms=("padding",),
                   build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, distance),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   domain={"num_heads": [1, 2, 4]},
                   declares={"causal": False, "positions": "alibi", "norm": "layer", "norm_placement": "pre",
                             "final_norm": True, "activation": "relu", "padding_side": "both"})


right, wrong = subject(both_ways), subject(one_way)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Encoder(11, 16, 2, 1, 32, both_ways), Encoder(11, 16, 2, 1, 32, one_way)
    z.load_state_dict(a.state_dict())
    ids, m = torch.randint(0, 11, (1, 9)), a.layers[0]
    x = a.emb(ids)
    q, k, v = (p.view(1, 9, 2, 8).transpose(1, 2) for p in m["qkv"](m["n1"](x)).chunk(3, -1))
    bias = torch.tensor([[[-abs(s - t) * r for s in range(9)] for t in range(9)] for r in (1 / 16, 1 / 256)])
    x = x + m["o"](((q @ k.mT / 8 ** 0.5 + bias).softmax(-1) @ v).transpose(1, 2).reshape(1, 9, 16))
    want = a.final(x + m["down"](F.relu(m["up"](m["n2"](x)))))
    dr, dw = ((n(ids) - want).abs().amax((0, 2)) for n in (a, z))
    flip = [(n(ids.flip(1)).flip(1) - n(ids)).abs().max().item() for n in (a, z)]
    print(dr.max().item(), dw.tolist(), "mirrored:", flip)
    assert dr.max() < 1e-5 and dw[0] > 1e-3 and dw[-1] < 1e-5 and flip[0] < 1e-5 and flip[1] > 1e-3
