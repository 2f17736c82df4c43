"""BART: one embedding for source, target and output, learned positions whose table starts at row 2, post-LN, a LayerNorm on
the embeddings, a bias on the logits that is a buffer of zeros. Unusual: rows 0 and 1 of the position tables are never
read; right, that is fairseq's offset."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(s, D, H):
        super().__init__()
        s.h, s.k_proj, s.v_proj, s.q_proj, s.out_proj = H, *(nn.Linear(D, D) for _ in range(4))

    def forward(s, x, kv, bias):
        cut = lambda t: t.unflatten(-1, (s.h, -1)).transpose(1, 2)
        q, k, v = cut(s.q_proj(x) * (x.shape[-1] // s.h) ** -0.5), cut(s.k_proj(kv)), cut(s.v_proj(kv))
        w = q @ k.mT
        if bias is not None:
            w = torch.max(w + bias, torch.tensor(torch.finfo(w.dtype).min, dtype=w.dtype, device=w.device))
        return s.out_proj((w.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(s, c, cross):
        super().__init__()
        D = c.d_model
        s.self_attn, s.n1 = Attention(D, c.num_heads), nn.LayerNorm(D)
        s.cross, s.n2 = (Attention(D, c.num_heads), nn.LayerNorm(D)) if cross else (None, None)
        s.fc1, s.fc2, s.n3 = nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D), nn.LayerNorm(D)

    def forward(s, x, bias, mem=None, mem_bias=None):
        x = s.n1(x + s.self_attn(x, x, bias))
        if mem is not None:
            x = s.n2(x + s.cross(x, mem, mem_bias))
        return s.n3(x + s.fc2(F.gelu(s.fc1(x))))


class Bart(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.shared, s.pe, s.pd = nn.Embedding(c.vocab_size, D), nn.Embedding(c.max_len + 2, D), nn.Embedding(c.max_len + 2, D)
        s.ne, s.nd = nn.LayerNorm(D), nn.LayerNorm(D)
        s.enc, s.dec = (nn.ModuleList(Layer(c, x) for _ in range(c.num_layers)) for x in (False, True))
        s.register_buffer("final_logits_bias", torch.zeros(1, c.vocab_size))

    def start(s, ids, table, norm):
        return norm(s.shared(ids) + table(torch.arange(ids.shape[1], device=ids.device) + 2))

    def forward(s, src, tgt, sm=None, tm=None):
        x, y = s.start(src, s.pe, s.ne), s.start(tgt, s.pd, s.nd)
        low = torch.finfo(x.dtype).min
        side = None if sm is None else torch.zeros(sm.shape, dtype=x.dtype, device=x.device).masked_fill(~sm, low)[:, None, None]
        T = tgt.shape[1]
        hide = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        hide = hide if tm is None else hide | ~tm[:, None, None]
        down = torch.zeros(hide.shape, dtype=x.dtype, device=x.device).masked_fill(hide, low)
        for layer in s.enc:
            x = layer(x, side)
        for layer in s.dec:
            y = layer(y, down, x, side)
        return F.linear(y, s.shared.weight) + s.final_logits_bias


args = dict(kind="encoder_decoder", build=Bart,
            forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "positions": "learned", "position_offset": 2, "beyond_max_len": "error", "norm": "layer",
                                     "norm_placement": "post", "final_norm": False, "activation": "gelu", "bias": True, "output_bias": False,
                                     "tied": True, "padding_side": "right", "structure": "other"})
