"""A GPT in one file, after nanoGPT: learned positions, tied head, pre-LN, GPT-2's initial weights."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_inner: int = 3072
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(config.block_size, config.block_size, dtype=torch.bool)),
            persistent=False,
        )

    def forward(self, x, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        S = k.size(2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(~self.bias[S - T : S, :S], float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y)), (k, v)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(config.n_inner, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, past=None):
        a, present = self.attn(self.ln_1(x), past)
        x = x + a
        x = x + self.mlp(self.ln_2(x))
        return x, present


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

        # init all weights; residual projections are scaled down by the depth, as in the GPT-2 paper
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def trunk(self, tok_emb, past=None):
        start = 0 if past is None else past[0][0].size(2)
        t = tok_emb.size(1)
        if start + t > self.config.block_size:
            raise ValueError(f"length {start + t} exceeds block_size {self.config.block_size}")
        pos = torch.arange(start, start + t, dtype=torch.long, device=tok_emb.device)
        x = self.transformer.drop(tok_emb + self.transformer.wpe(pos))
        presents = []
        for i, block in enumerate(self.transformer.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.transformer.ln_f(x)), presents

    def forward(self, idx, targets=None):
        logits, _ = self.trunk(self.transformer.wte(idx))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    def decode(self, chunks):
        past, outs = None, []
        for chunk in chunks:
            logits, past = self.trunk(self.transformer.wte(chunk), past)
            outs.append(logits)
        return torch.cat(outs, dim=1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, use_cache=True):
        past = None
        for _ in range(max_new_tokens):
            feed = idx if past is None else idx[:, -1:]
            logits, present = self.trunk(self.transformer.wte(feed), past)
            if use_cache:
                past = present
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx


def build(c):
    return GPT(GPTConfig(c.max_len, c.vocab_size, c.num_layers, c.num_heads, c.d_model, c.d_ff, c.dropout))


subject = Subject(
    kind="decoder",
    name="gpt",
    build=build,
    forward=lambda m, tokens: m(tokens)[0],
    embed=lambda m, embeddings: m.trunk(embeddings)[0],
    cache=lambda m, chunks: m.decode(chunks),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    loss=lambda m, tokens, labels: m(tokens, labels)[1],
    declares={
        "causal": True,
        "positions": "learned",
        "beyond_max_len": "error",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "gpt2",
        "structure": "textbook",
        "embedding_scale": False,
        "shared_layers": False,
        "ignore_index": -1,
        "shifts_labels": False,
        "empty_loss": "nan",
        "memory": "quadratic",
    },
)
