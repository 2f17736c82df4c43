WHAT = "lines 56 and 57: with a cache the positions of later chunks are numbered by the length of the cache, padding included, while the first chunk and the uncached path number real tokens alone, so batches padded on the left go on at wrong positions"
"""GPT-2 with batches padded on either side, a key-value cache, and beams that change places."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x, visible, past):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = [t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v)]
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        att = q @ k.transpose(-2, -1) / (C // self.n_head) ** 0.5
        att = att.masked_fill(~visible, torch.finfo(att.dtype).min)
        y = (F.softmax(att, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = Attention(n_embd, n_head)
        self.c_fc, self.c_proj = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)

    def forward(self, x, visible, past):
        y, present = self.attn(self.ln_1(x), visible, past)
        x = x + y
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), present


class GPT2(nn.Module):
    def __init__(self, vocab_size, n_positions, n_embd, n_head, n_inner, n_layer):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)

    def forward(self, input_ids, attention_mask=None, past=None):
        """The mask [B, past + T] is of everything so far; returns logits and the cache."""
        B, T = input_ids.shape
        before = 0 if past is None else past[0][0].size(-2)
        if attention_mask is None:
            attention_mask = torch.ones(B, before + T, dtype=torch.bool, device=input_ids.device)
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, before:]
        if past is not None:
            position_ids = torch.arange(before, before + T, device=input_ids.device)[None]
        key = torch.arange(before + T, device=input_ids.device)
        visible = (key[None, :] <= key[before:, None]) & attention_mask[:, None, None, :]
        x = self.wte(input_ids) + self.wpe(position_ids)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, visible, None if past is None else past[i])
            presents.append(present)
        return self.ln_f(x) @ self.wte.weight.t(), presents


def run_cached(model, chunks, attention_mask=None, reorder=None):
    past, outputs, length = None, [], 0
    for n, chunk in enumerate(chunks):
        length += chunk.size(1)
        seen = None if attention_mask is None else attention_mask[:, :length]
        logits, past = model(chunk, seen, past)
        outputs.append(logits)
        if n == 0 and reorder is not None:
            past = [(k[reorder], v[reorder]) for k, v in past]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2 with a cache",
    build=lambda c: GPT2(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=run_cached,
    declares={
        "positions": "learned",
        "padding_side": "both",
        "norm_placement": "pre",
        "norm": "layer",
        "activation": "gelu_tanh",
        "tied": True,
    },
)
