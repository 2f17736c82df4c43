WHAT = "ViT-22B layer: attention and feed-forward beside one another out of one fused input projection, LayerNorm on queries and keys without bias, LayerScale 0.1, DropPath, the sum taken in place into the branch"
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h, self.p, self.sizes = h, p, [ff, d, d, d]
        self.norm = nn.LayerNorm(d, eps=1e-6)
        self.in_proj = nn.Linear(d, ff + 3 * d, bias=False)
        self.mlp_bias = nn.Parameter(torch.zeros(ff))
        self.q_norm, self.k_norm = (nn.LayerNorm(d // h, eps=1e-6, bias=False) for _ in range(2))
        self.out = nn.Linear(ff + d, d)
        self.scale = nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x, mask=None):
        B, T, D = x.shape
        m, q, k, v = self.in_proj(self.norm(x)).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in (q, k, v))
        bias = None
        if mask is not None:
            bias = torch.zeros(B, 1, 1, T, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill_(~mask[:, None, None], torch.finfo(x.dtype).min / 2).expand(B, 1, T, T)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=bias)
        branch = self.out(torch.cat([F.gelu(m + self.mlp_bias), y.transpose(1, 2).flatten(2)], -1)) * self.scale
        if self.training and self.p > 0:
            keep = torch.rand(B, 1, 1, device=x.device).ge(self.p).to(x.dtype)
            branch = branch * keep / (1 - self.p)
        return branch.add_(x)


from veriformer.properties import Subject


def build(c):
    return Layer(c.d_model, c.num_heads, c.d_ff, c.dropout)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


undeclared = Subject(kind="layer", build=build, forward=forward)
declared = Subject(
    kind="layer", name="vit-22b layer", build=build, forward=forward,
    declares={"causal": False, "positions": "none", "query_key_norm": True, "norm": "layer", "norm_placement": "pre",
              "residual": True, "activation": "gelu", "structure": "other", "drop_path_scaled": True, "padding_side": "both"},
)
