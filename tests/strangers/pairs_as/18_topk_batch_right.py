import torch
import torch.nn as nn
from torch.nn import functional as F
from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.n_head = h
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))

    def attend(self, x, ok):
        B, T, C = x.shape
        q, k, v = [z.view(B, T, self.n_head, -1).transpose(1, 2) for z in self.c_attn(x).split(C, 2)]
        att = torch.baddbmm(q.new_zeros(()), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
        att = att.view(B, self.n_head, T, T).masked_fill(~ok, torch.finfo(q.dtype).min)
        att = att.softmax(-1).masked_fill(~ok, 0.0)
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))

    def forward(self, x, ok):
        x = x + self.attend(self.ln_1(x), ok)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx, attention_mask=None):
        T = idx.shape[1]
        ok = torch.tril(torch.ones(T, T, dtype=torch.bool, device=idx.device))[None, None]
        if attention_mask is not None:
            ok = ok & attention_mask[:, None, None, :]
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        for block in self.h:
            x = block(x, ok)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, idx, steps, temperature=1.0, top_k=None):
        seen = []
        for _ in range(steps):
            logits = self(idx)[:, -1] / temperature
            if top_k is not None:
                best = torch.topk(logits, min(top_k, logits.shape[-1])).values
                logits = logits.masked_fill(logits < best[:, -1:], float("-inf"))
            probs = F.softmax(logits, -1)
            seen.append(probs)
            idx = torch.cat([idx, torch.multinomial(probs, 1)], 1)
        return idx, torch.stack(seen, 1)


subject = Subject(
    kind="decoder",
    build=GPT,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "gelu", "bias": True, "output_bias": False, "tied": False,
              "padding_side": "right"},
)
