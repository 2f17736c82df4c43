"""GPT-J style: attention and feed-forward in parallel behind one norm, partial interleaved rotary positions (4 channels a
head), head with a bias, SDPA with a boolean mask. Unusual: the diagonal is always allowed, so that a padded query never
has an empty row; right, since real queries see themselves anyway and padded outputs are read by nobody."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject
R = 4


def rotate(x, pos):
    inv = 10000.0 ** (-torch.arange(0, R, 2, device=x.device, dtype=torch.float64) / R)
    ang = (pos.double()[:, None] * inv).repeat_interleave(2, -1)
    sin, cos = ang.sin().to(x.dtype), ang.cos().to(x.dtype)
    r, rest = x[..., :R], x[..., R:]
    turned = torch.stack((-r[..., 1::2], r[..., ::2]), -1).flatten(-2)
    return torch.cat((r * cos + turned * sin, rest), -1)


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.ln = c.num_heads, nn.LayerNorm(D)
        s.q, s.k, s.v, s.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        s.up, s.down = nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D)

    def forward(s, x, mask, past=None):
        y = s.ln(x)
        q, k, v = (p(y).unflatten(-1, (s.h, -1)).transpose(1, 2) for p in (s.q, s.k, s.v))
        start = 0 if past is None else past[0].shape[2]
        pos = torch.arange(start, start + x.shape[1], device=x.device)
        q, k = rotate(q, pos), rotate(k, pos)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        cols = torch.arange(k.shape[2], device=x.device)
        keep = cols[None] <= pos[:, None]
        if mask is not None:
            keep = keep & mask[:, None, None, :] | (cols[None] == pos[:, None])
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2)
        return x + s.o(a) + s.down(F.gelu(s.up(y), approximate="tanh")), (k, v)


class GPTJ(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.wte, s.blocks = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Block(c) for _ in range(c.num_layers))
        s.ln_f, s.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(s, tokens, mask=None, past=None):
        x, new = s.wte(tokens), []
        for i, b in enumerate(s.blocks):
            x, kv = b(x, mask, None if past is None else past[i])
            new.append(kv)
        return s.head(s.ln_f(x)), new


def cache(m, chunks):
    past, outs = None, []
    for ch in chunks:
        y, past = m(ch, None, past)
        outs.append(y)
    return torch.cat(outs, 1)


args = dict(kind="decoder", build=GPTJ, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0], cache=cache,
            domain={"d_model": [16, 32], "num_heads": [2, 4]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "rotary", "rotary_dim": R, "layout": "interleaved", "norm": "layer",
                                     "norm_placement": "pre", "final_norm": True, "activation": "gelu_tanh", "output_bias": True,
                                     "tied": False, "structure": "other", "padding_side": "both"})
