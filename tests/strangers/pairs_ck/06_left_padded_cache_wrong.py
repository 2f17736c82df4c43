"""GPT-2 with batches padded on the left, and a cache for them."""
import torch
from torch import nn

from veriformer.properties import Subject


class GPT2Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.c_out = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)

    def forward(self, x, allowed, layer_past=None):
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (z.reshape(b, t, self.n_head, -1).transpose(1, 2) for z in (q, k, v))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), -2), torch.cat((layer_past[1], v), -2)
        w = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        w = torch.where(allowed, w, torch.full_like(w, torch.finfo(w.dtype).min)).softmax(-1)
        x = x + self.c_proj(torch.matmul(w, v).transpose(1, 2).reshape(b, t, d))
        return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), (k, v)


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(GPT2Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)

    @staticmethod
    def position_ids(past, length, mask, device):
        if mask is None or past:
            return torch.arange(past, past + length, device=device)[None]
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]

    def forward(self, ids, mask=None, pasts=None):
        past = 0 if pasts is None else pasts[0][0].shape[-2]
        t = ids.shape[1]
        x = self.wte(ids) + self.wpe(self.position_ids(past, t, mask, ids.device))
        allowed = torch.ones(t, past + t, dtype=torch.bool, device=ids.device).tril(past)[None, None]
        if mask is not None:
            itself = torch.eye(past + t, dtype=torch.bool, device=ids.device)[past:]
            allowed = allowed & mask[:, None, None, :] | itself
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, allowed, None if pasts is None else pasts[i])
            presents.append(present)
        return self.ln_f(x) @ self.wte.weight.t(), presents


def cache(model, chunks, attention_mask=None):
    outs, pasts, done = [], None, 0
    for chunk in chunks:
        done += chunk.shape[1]
        out, pasts = model(chunk, None if attention_mask is None else attention_mask[:, :done], pasts)
        outs.append(out)
    return outs


subject = Subject(
    kind="decoder",
    name="gpt2, padded on the left",
    build=GPT2,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cache,
    declares={"positions": "learned", "padding_side": "both", "tied": True, "norm_placement": "pre",
              "activation": "gelu_tanh"},
)

WHAT = 'Line 37: behind a cache positions are counted from the length of the cache, padding and all, though the first chunk counted real tokens: a sample padded on the left jumps ahead after its first chunk.'
