from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.nn import CrossEntropyLoss

from veriformer.properties import Subject


class GPT2Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, hidden_states, attention_mask):
        b, t, d = hidden_states.shape
        qkv = self.c_attn(hidden_states).view(b, t, 3, self.num_heads, d // self.num_heads)
        query, key, value = qkv.unbind(2)
        weights = torch.einsum("bthd,bshd->bhts", query, key) / (d // self.num_heads) ** 0.5
        weights = (weights + attention_mask).softmax(-1)
        return self.c_proj(torch.einsum("bhts,bshd->bthd", weights, value).reshape(b, t, d))


class GPT2Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, hidden_states, attention_mask):
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), attention_mask)
        return hidden_states + self.c_proj(self.act(self.c_fc(self.ln_2(hidden_states))))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList([GPT2Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=1e-5)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels=None):
        t = input_ids.shape[1]
        hidden_states = self.wte(input_ids) + self.wpe(torch.arange(t, device=input_ids.device))
        lowest = torch.finfo(hidden_states.dtype).min
        attention_mask = torch.full((t, t), lowest, dtype=hidden_states.dtype, device=input_ids.device).triu(1)
        for block in self.h:
            hidden_states = block(hidden_states, attention_mask)
        logits = self.lm_head(self.ln_f(hidden_states))

        loss = None
        if labels is not None:
            # Shift so that tokens < n predict n
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = labels[..., 1:].contiguous()
            loss = CrossEntropyLoss()(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
        return SimpleNamespace(loss=loss, logits=logits)


def build(c):
    return GPT2LMHeadModel(
        SimpleNamespace(
            vocab_size=c.vocab_size, n_embd=c.d_model, n_head=c.num_heads, n_layer=c.num_layers, n_positions=c.max_len
        )
    )


subject = Subject(
    kind="decoder",
    name="GPT2LMHeadModel",
    build=build,
    forward=lambda m, tokens: m(tokens).logits,
    loss=lambda m, tokens, labels: m(tokens, labels=labels).loss,
    declares={
        "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True, "tied": True,
        "activation": "gelu_tanh", "shifts_labels": True, "ignore_index": -100, "empty_loss": "nan",
        "output_bias": False,
    },
)
