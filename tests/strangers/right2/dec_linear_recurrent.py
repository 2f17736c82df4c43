"""Causal linear attention (elu + 1) by running sums, with a state of constant size as its cache, ReZero residuals and no
norms. Unusual: no softmax, no scores, no norm; right, the weights are phi(q)phi(k) over their sum, as in Katharopoulos 2020."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.qkv, s.o = c.num_heads, nn.Linear(D, 3 * D), nn.Linear(D, D)
        s.up, s.down = nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D)
        s.a, s.b = nn.Parameter(torch.full((1,), 0.5)), nn.Parameter(torch.full((1,), 0.5))

    def forward(s, x, mask, state=None):
        q, k, v = s.qkv(x).unflatten(-1, (3, s.h, -1)).unbind(2)  # B T H K
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if mask is not None:
            k = k * mask[..., None, None].to(k.dtype)
        kv, z = torch.einsum("bthk,bthe->bthke", k, v).cumsum(1), k.cumsum(1)
        if state is not None:
            kv, z = kv + state[0], z + state[1]
        y = torch.einsum("bthk,bthke->bthe", q, kv) / ((q * z).sum(-1, keepdim=True) + 1e-12)
        x = x + s.a * s.o(y.flatten(2))
        return x + s.b * s.down(F.relu(s.up(x))), (kv[:, -1:], z[:, -1:])


class Linear(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.layers = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        s.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(s, tokens, mask=None, states=None):
        x, new = s.emb(tokens), []
        for i, layer in enumerate(s.layers):
            x, st = layer(x, mask, states[i] if states else None)
            new.append(st)
        return s.head(x), new


def cache(m, chunks):
    states, outs = None, []
    for ch in chunks:
        y, states = m(ch, None, states)
        outs.append(y)
    return torch.cat(outs, 1)


args = dict(kind="decoder", build=Linear, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0], cache=cache)
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "none", "norm": "none", "final_norm": False, "activation": "relu",
                                     "tied": False, "output_bias": True, "structure": "other", "padding_side": "both", "memory": "linear"})
