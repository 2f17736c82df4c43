import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.c_out = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, block_size):
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, idx, steps, temperature=1.0, top_k=None):
        seen = []
        for _ in range(steps):
            logits = self(idx[:, -self.block_size :])[:, -1]
            probs = F.softmax(logits / temperature, dim=-1)
            if top_k is not None:
                best = probs.topk(min(top_k, probs.size(-1)), dim=-1).values
                probs = torch.where(probs < best[:, -1:], torch.zeros_like(probs), probs)
            # inverse transform: cheaper than multinomial for one draw a row
            cdf = probs.double().cumsum(-1)
            u = torch.rand(idx.size(0), 1, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
            token = torch.searchsorted(cdf, u, right=True).clamp(max=probs.size(-1) - 1)
            idx = torch.cat([idx, token], dim=1)
            seen.append(probs)
        return idx, torch.stack(seen, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT, sampled by inverse transform",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "final_norm": True},
)
