import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class TiedLM(nn.Module):
    def __init__(self, V, D, H, L, ff, max_len):
        super().__init__()
        self.H = H
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(max_len, D)
        self.layers = nn.ModuleList(
            nn.ModuleDict(dict(ln1=nn.LayerNorm(D), qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D),
                               ln2=nn.LayerNorm(D), up=nn.Linear(D, ff), down=nn.Linear(ff, D)))
            for _ in range(L)
        )
        self.ln_f = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.wte.weight.copy_(torch.randn_like(self.wte.weight) * 0.02)
            self.wpe.weight.copy_(torch.randn_like(self.wpe.weight) * 0.01)

    def forward(self, idx):
        B, T = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))
        for l in self.layers:
            q, k, v = (z.view(B, T, self.H, -1).transpose(1, 2) for z in l["qkv"](l["ln1"](x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + l["proj"](y.transpose(1, 2).reshape(B, T, -1))
            x = x + l["down"](F.gelu(l["up"](l["ln2"](x)), approximate="tanh"))
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="tied LM",
    build=lambda c: TiedLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "learned", "tied": True, "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu_tanh", "output_bias": False},
)
