"""Generation without torch.multinomial: the Gumbel trick, behind the filters of temperature and top-k."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.ln_2(x))


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, tokens, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(tokens)[:, -1]
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -torch.inf)
            gumbel = -torch.empty_like(logits).exponential_().log()
            chosen = ((logits + gumbel) / temperature).argmax(-1, keepdim=True)
            drawn_from.append((logits / temperature).softmax(-1))
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="LM with Gumbel sampling",
    build=LM,
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={"positions": "learned", "norm_placement": "pre", "activation": "gelu"},
)

WHAT = (
    'The Gumbel noise is divided by the temperature together with the logits (line 47), which leaves the argmax alone: tokens are drawn at temperature 1 whatever is asked.'
)
