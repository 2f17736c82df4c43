"""GPT-2 for beam search over left-padded prompts: the state of decoding is a small dataclass."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


@dataclass
class DecodeState:
    keys: list
    values: list
    mask: torch.Tensor  # [B, S], True = real
    next_position: torch.Tensor  # [B], index of the next real token

    @classmethod
    def empty(cls, batch, layers, device):
        return cls(
            [None] * layers,
            [None] * layers,
            torch.zeros(batch, 0, dtype=torch.bool, device=device),
            torch.zeros(batch, dtype=torch.long, device=device),
        )

    def reorder(self, beam_idx):
        self.keys = [k.index_select(0, beam_idx) for k in self.keys]
        self.values = [v.index_select(0, beam_idx) for v in self.values]
        self.mask = self.mask.index_select(0, beam_idx)
        self.next_position = self.next_position.index_select(0, beam_idx)


class Conv1D(nn.Module):
    def __init__(self, nx, nf):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) / math.sqrt(nx))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = Conv1D(n_embd, 3 * n_embd)
        self.c_proj = Conv1D(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = Conv1D(n_embd, n_inner)
        self.c_out = Conv1D(n_inner, n_embd)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.n_head, -1).permute(0, 2, 1, 3)

    def forward(self, x, bias, past_k, past_v):
        q, k, v = map(self.split, self.c_attn(self.ln_1(x)).chunk(3, dim=-1))
        if past_k is not None:
            k, v = torch.cat((past_k, k), dim=-2), torch.cat((past_v, v), dim=-2)
        w = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        w = w.masked_fill(~bias, torch.finfo(w.dtype).min).softmax(dim=-1)
        a = torch.matmul(w, v).permute(0, 2, 1, 3).flatten(2)
        x = x + self.c_proj(a)
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), k, v


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, attention_mask=None, state=None):
        b, t = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones(b, t, dtype=torch.bool, device=input_ids.device)
        if state is None:
            state = DecodeState.empty(b, len(self.h), input_ids.device)
        count = attention_mask.long().cumsum(1)
        position_ids = (state.next_position[:, None] + count - 1).clamp(min=0)
        past = state.mask.shape[1]
        state.mask = torch.cat((state.mask, attention_mask), dim=1)
        state.next_position = state.next_position + count[:, -1]
        causal = torch.ones(t, past + t, dtype=torch.bool, device=input_ids.device).tril(past)
        bias = causal & state.mask[:, None, None, :]
        x = self.wte(input_ids) + self.wpe(position_ids)
        for i, block in enumerate(self.h):
            x, state.keys[i], state.values[i] = block(x, bias, state.keys[i], state.values[i])
        return self.lm_head(self.ln_f(x)), state


def cached(model, chunks, attention_mask=None, reorder=None):
    outputs, state, at = [], None, 0
    for n, chunk in enumerate(chunks):
        if n == 1 and reorder is not None:
            state.reorder(reorder)
        mask = None if attention_mask is None else attention_mask[:, at : at + chunk.shape[1]]
        logits, state = model(chunk, mask, state)
        outputs.append(logits)
        at += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2 with beams",
    build=GPT2,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu_tanh",
        "tied": True,
        "padding_side": "both",
    },
)
