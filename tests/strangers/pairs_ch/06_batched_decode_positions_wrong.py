"""GPT served in batches: prompts are padded on the left, decoding goes on from a cache of keys and values."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x, allowed, past):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.n_head, -1).transpose(1, 2) for z in self.c_attn(x).split(C, 2))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        w = (q @ k.transpose(2, 3)) / k.shape[-1] ** 0.5
        w = w.masked_fill(~allowed[:, None], torch.finfo(w.dtype).min).softmax(-1)
        return self.c_proj((w @ v).transpose(1, 2).reshape(B, T, C)), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention(n_embd, n_head)
        self.c_fc, self.c_out = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)

    def forward(self, x, allowed, past=None):
        a, past = self.attn(self.ln_1(x), allowed, past)
        x = x + a
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), past


class ServedGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, ids, mask=None, pasts=None, done=0):
        """`mask` is of all tokens up to the end of `ids`, `done` of which are in the cache."""
        B, T = ids.shape
        if mask is None:
            mask = ids.new_ones(B, done + T, dtype=torch.bool)
        before = done
        place = (before + mask[:, done:].long().cumsum(1) - 1).clamp(min=0)
        x = self.wte(ids) + self.wpe(place)
        ahead = torch.arange(done + T, device=ids.device)[None, :] > torch.arange(done, done + T, device=ids.device)[:, None]
        allowed = mask[:, None, :] & ~ahead
        kept = []
        for i, block in enumerate(self.h):
            x, past = block(x, allowed, None if pasts is None else pasts[i])
            kept.append(past)
        return self.lm_head(self.ln_f(x)), kept


def serve(model, chunks, attention_mask=None):
    outs, pasts, done = [], None, 0
    for ids in chunks:
        upto = done + ids.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :upto]
        logits, pasts = model(ids, mask, pasts, done)
        outs.append(logits)
        done = upto
    return outs


subject = Subject(
    kind="decoder",
    name="served GPT",
    build=ServedGPT,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=serve,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu_tanh", "padding_side": "both"},
)

WHAT = 'Cached steps count padding among the tokens before: behind a prompt that is padded on the left, new tokens get positions that are too late by the padding (line 51).'
