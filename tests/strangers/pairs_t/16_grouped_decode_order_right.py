"""A decoder with grouped queries, learned positions and a decode path that does not copy keys."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GroupedAttention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, width // heads
        self.repeats = heads // groups
        self.wq = nn.Linear(width, heads * self.dim)
        self.wkv = nn.Linear(width, 2 * groups * self.dim)
        self.wo = nn.Linear(heads * self.dim, width)

    def prefill(self, q, k, v, past):
        T, S = q.shape[2], k.shape[2]
        k, v = k.repeat_interleave(self.repeats, dim=1), v.repeat_interleave(self.repeats, dim=1)
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        ahead = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1 + past)
        return scores.masked_fill(ahead, -torch.inf).softmax(dim=-1) @ v

    def decode(self, q, k, v):
        """One query a head: the heads of a group are the rows of one product with its keys."""
        B = q.shape[0]
        q = q.view(B, self.groups, self.repeats, self.dim)
        weights = torch.einsum("bgrd,bgsd->bgrs", q * self.dim**-0.5, k).softmax(dim=-1)
        y = torch.einsum("bgrs,bgsd->bgrd", weights, v)
        return y.reshape(B, self.heads, 1, self.dim)

    def forward(self, x, past):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.heads, self.dim).transpose(1, 2).contiguous()
        k, v = self.wkv(x).view(B, T, 2, self.groups, self.dim).permute(2, 0, 3, 1, 4)
        before = 0
        if past is not None:
            before = past[0].shape[2]
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        y = self.decode(q, k, v) if T == 1 and before else self.prefill(q, k, v, before)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1)), (k, v)


class Block(nn.Module):
    def __init__(self, width, heads, groups, hidden):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = GroupedAttention(width, heads, groups)
        self.c_fc, self.c_proj = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, past):
        y, present = self.attn(self.ln_1(x), past)
        x = x + y
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), present


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(
            [Block(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)]
        )
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, past=None):
        before = past[0][0].shape[2] if past is not None else 0
        positions = before + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def decode_in_chunks(model, chunks):
    outputs, past = [], None
    for chunk in chunks:
        logits, past = model(chunk, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    build=Decoder,
    forward=lambda model, tokens: model(tokens)[0],
    cache=decode_in_chunks,
    declares={"positions": "learned", "grouped_queries": True},
)
