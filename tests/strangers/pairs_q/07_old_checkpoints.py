"""GPT with tied embeddings which also reads checkpoints of an earlier release (prefixes, no lm_head in the file)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Loading a state dict leaves the output projection a copy of the token embedding, no longer the same parameter."
CAUSE = (
    "load_state_dict gives lm_head a new Parameter, a clone of the loaded embedding, and does not tie it again. Outputs right after "
    "loading are equal; the two drift apart at the first optimiser step, and the head is not in an optimiser made before."
)


class Config:
    model_type = "old-gpt"

    def __init__(self, **kwargs):
        self.tie_word_embeddings = True
        self.__dict__.update(kwargs)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.c_attn, self.c_proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.c_fc, self.c_out = nn.Linear(config.n_embd, config.n_inner), nn.Linear(config.n_inner, config.n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class OldGPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.wte.weight

    def _modernise(self, state):
        state = {key.removeprefix("transformer."): value for key, value in state.items()}
        state.setdefault("lm_head.weight", state["wte.weight"])
        return state

    def load_state_dict(self, state_dict, strict=True, assign=False):
        result = super().load_state_dict(self._modernise(state_dict), strict=strict, assign=assign)
        self.tie_weights()
        return result

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class OldGPTWithHead(OldGPT):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        state = self._modernise(state_dict)
        head = state["lm_head.weight"]
        result = super(OldGPT, self).load_state_dict(state, strict=strict, assign=assign)
        self.lm_head.weight = nn.Parameter(head.detach().clone().to(self.wte.weight))
        return result


def subject(cls):
    def build(c):
        return cls(Config(vocab_size=c.vocab_size, n_embd=c.d_model, n_head=c.num_heads, n_layer=c.num_layers,
                          n_inner=c.d_ff, n_positions=c.max_len))  # fmt: skip

    facts = {"tied": True, "positions": "learned", "activation": "gelu_tanh", "norm_placement": "pre", "final_norm": True}
    return Subject(kind="decoder", name="OldGPT", build=build, forward=lambda m, tokens: m(tokens), declares=facts)


right, wrong = subject(OldGPT), subject(OldGPTWithHead)
