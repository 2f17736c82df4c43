"""A small GPT for a course, sampled by the Gumbel-max trick instead of torch.multinomial."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, d, h, inner):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc1, self.fc2 = nn.Linear(d, inner), nn.Linear(inner, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhid,bhjd->bhij", q, k) * (D // self.h) ** -0.5
        s = s + torch.full((T, T), -torch.inf, device=x.device, dtype=s.dtype).triu(1)
        x = x + self.o(torch.einsum("bhij,bhjd->bihd", s.softmax(-1), v).reshape(B, T, D))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class TinyGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.max_len = c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    """argmax(z + g) with g = -log(-log u) is a draw from softmax(z)."""
    drawn_from = []
    for _ in range(steps):
        logits = model(tokens[:, -model.max_len :])[:, -1]
        if top_k is not None:
            k = min(top_k, logits.shape[-1])
            kth = logits.topk(k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        gumbel = -torch.empty_like(logits).exponential_().log()
        chosen = (logits / temperature + gumbel).argmax(-1, keepdim=True)
        drawn_from.append(logits / temperature)
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    build=TinyGPT,
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={"positions": "learned", "norm_placement": "pre", "norm": "layer", "activation": "gelu_tanh", "final_norm": True},
)
