"""Groups for AdamW: matrices decay, biases and gains do not."""
import torch
from torch import nn

from veriformer.properties import Subject


class TinyGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(c.d_model),
                    "attn": nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True),
                    "ln_2": nn.LayerNorm(c.d_model),
                    "fc": nn.Linear(c.d_model, c.d_ff),
                    "proj": nn.Linear(c.d_ff, c.d_model),
                }
            )
            for _ in range(c.num_layers)
        )
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        T = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        hidden = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
        for b in self.h:
            y = b["ln_1"](x)
            x = x + b["attn"](y, y, y, attn_mask=hidden, need_weights=False)[0]
            x = x + b["proj"](nn.functional.gelu(b["fc"](b["ln_2"](x))))
        return self.lm_head(self.ln_f(x))


def configure(model, weight_decay=0.1):
    decay, no_decay, seen = [], [], set()
    for module in model.modules():
        for p in module._parameters.values():
            if p is None or id(p) in seen or not p.requires_grad:
                continue
            seen.add(id(p))
            (decay if p.dim() >= 2 else no_decay).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a tied GPT",
    build=TinyGPT,
    forward=lambda m: configure(m),
    declares={"tied": True},
)
