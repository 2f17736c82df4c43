"""A decoder without positions (NoPE), with a cache of keys and values and beam reordering. Unusual: nothing tells the order
but the causal mask; right, that is what NoPE is."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class NoPE(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.emb = c.num_heads, nn.Embedding(c.vocab_size, D)
        mk = lambda: nn.ModuleDict(dict(n1=nn.LayerNorm(D), qkv=nn.Linear(D, 3 * D), o=nn.Linear(D, D), n2=nn.LayerNorm(D),
                                        up=nn.Linear(D, c.d_ff), down=nn.Linear(c.d_ff, D)))
        s.layers = nn.ModuleList(mk() for _ in range(c.num_layers))
        s.norm, s.head = nn.LayerNorm(D), nn.Linear(D, c.vocab_size, bias=False)

    def forward(s, tokens, mask=None, store=None):
        x = s.emb(tokens)
        B, T, D = x.shape
        for i, L in enumerate(s.layers):
            q, k, v = (t.view(B, T, s.h, -1).transpose(1, 2) for t in L["qkv"](L["n1"](x)).chunk(3, -1))
            if store is not None:
                if i in store:
                    k, v = torch.cat((store[i][0], k), 2), torch.cat((store[i][1], v), 2)
                store[i] = (k, v)
            S = k.shape[2]
            hide = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
            if mask is not None:
                hide = hide | ~mask[:, None, None, :]
            w = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hide, torch.finfo(x.dtype).min).softmax(-1)
            x = x + L["o"]((w @ v).transpose(1, 2).reshape(B, T, D))
            x = x + L["down"](F.relu(L["up"](L["n2"](x))))
        return s.head(s.norm(x))


def cache(m, chunks, reorder=None):
    store, outs = {}, []
    for n, ch in enumerate(chunks):
        if n == 1 and reorder is not None:
            store = {i: (k[reorder], v[reorder]) for i, (k, v) in store.items()}
        outs.append(m(ch, store=store))
    return torch.cat(outs, 1)


def generate(m, tokens, steps, use_cache):
    store, new = ({} if use_cache else None), tokens
    for _ in range(steps):
        nxt = m(new if use_cache else tokens, store=store)[:, -1:].argmax(-1)
        tokens, new = torch.cat((tokens, nxt), 1), nxt
    return tokens


args = dict(kind="decoder", build=NoPE, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), cache=cache, generate=generate)
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "none", "norm": "layer", "norm_placement": "pre", "final_norm": True,
                                     "activation": "relu", "bias": True, "output_bias": False, "tied": False, "padding_side": "both"})
