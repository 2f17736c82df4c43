WHAT = "the head is 'tied' by wrapping the embedding's data in a second nn.Parameter: one storage, but two parameters with separate gradients, and an optimizer steps the same memory twice (line 49)."
import math
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.d = h, d
        self.in_proj = nn.Linear(d, 3 * d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.in_proj(x).chunk(3, -1)
        q, k, v = (y.reshape(B, T, self.h, -1).permute(0, 2, 1, 3) for y in (q, k, v))
        s = torch.einsum("bhik,bhjk->bhij", q, k) / math.sqrt(D // self.h)
        s = s.masked_fill(~mask, torch.finfo(s.dtype).min)
        y = torch.einsum("bhij,bhjk->bihk", s.softmax(-1).masked_fill(~mask, 0.0), v)
        return self.out_proj(y.reshape(B, T, D))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.attn, self.ln1, self.ln2 = Attn(d, h), nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, mask):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class TiedLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.embed_positions = nn.Embedding(cfg.max_len, cfg.d_model)
        self.layers = nn.ModuleList(DecoderLayer(cfg.d_model, cfg.num_heads, cfg.d_ff) for _ in range(cfg.num_layers))
        self.layer_norm = nn.LayerNorm(cfg.d_model)
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=cfg.d_model ** -0.5)
        self.tie_weights()

    def tie_weights(self):
        self.lm_head.weight = nn.Parameter(self.embed_tokens.weight.data)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        mask = torch.ones((T, T), dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None]
        x = self.embed_tokens(tokens) + self.embed_positions(torch.arange(T, device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.lm_head(self.layer_norm(x))


subject = Subject(
    kind="decoder",
    build=TiedLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "tied": True, "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "residual": True, "activation": "gelu", "bias": False, "output_bias": False,
              "padding_side": "right"},
)
