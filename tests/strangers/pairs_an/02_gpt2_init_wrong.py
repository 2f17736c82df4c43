WHAT = 'wrong factor in the GPT-2 initialisation: residual projections get std 0.02/sqrt(n_layer) where 2 * n_layer sublayers add to the stream, so 0.02/sqrt(2 n_layer) is meant (line 99: p.data.normal_(mean=0.0, std=config.initializer_range / math.sqrt(config.n_layer)))'
"""GPT-2 as Hugging Face writes it (Conv1D, _init_weights), with its initialisation."""
import math
from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class GPT2Config:
    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int
    pdrop: float = 0.0
    initializer_range: float = 0.02


class Conv1D(nn.Module):
    """A linear layer whose weight is [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.split_size = config.n_embd
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.pdrop)
        self.resid_dropout = nn.Dropout(config.pdrop)

    def forward(self, hidden_states, allowed):
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query, key, value = (t.view(shape).transpose(1, 2) for t in self.c_attn(hidden_states).split(self.split_size, dim=2))
        weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_dim)
        weights = weights.masked_fill(~allowed, torch.finfo(weights.dtype).min).softmax(dim=-1)
        weights = self.attn_dropout(weights)
        output = torch.matmul(weights, value).transpose(1, 2).reshape(hidden_states.shape)
        return self.resid_dropout(self.c_proj(output))


class GPT2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Conv1D(config.n_inner, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_inner)
        self.act = nn.GELU(approximate="tanh")
        self.dropout = nn.Dropout(config.pdrop)

    def forward(self, hidden_states):
        return self.dropout(self.c_proj(self.act(self.c_fc(hidden_states))))


class GPT2Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = GPT2MLP(config)

    def forward(self, hidden_states, allowed):
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), allowed)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.pdrop)
        self.h = nn.ModuleList([GPT2Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        # "A modified initialization which accounts for the accumulation on the residual path with model depth"
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                p.data.normal_(mean=0.0, std=config.initializer_range / math.sqrt(config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, Conv1D)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)

    def forward(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        hidden_states = self.wte(input_ids) + self.wpe(torch.arange(length, device=input_ids.device))
        hidden_states = self.drop(hidden_states)
        for block in self.h:
            hidden_states = block(hidden_states, allowed)
        return self.lm_head(self.ln_f(hidden_states))


subject = Subject(
    kind="decoder",
    name="GPT-2",
    build=lambda c: GPT2LMHeadModel(
        GPT2Config(c.vocab_size, c.max_len, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout)
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "init": "gpt2", "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu_tanh", "tied": True, "bias": True, "output_bias": False, "padding_side": "right",
    },
)
