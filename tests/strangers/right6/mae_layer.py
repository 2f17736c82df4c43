"""The encoder of a masked autoencoder: fixed sinusoids, only visible patches are kept, computed and put back."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, ignore):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, key_padding_mask=ignore, need_weights=False)[0]
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class MAEEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim = c.d_model
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model, eps=1e-6)

    def places(self, n, like):
        half = -(-self.dim // 2)
        omega = 1.0 / 10000 ** (torch.arange(half, device=like.device, dtype=torch.float64) * 2 / self.dim)
        out = torch.outer(torch.arange(n, device=like.device, dtype=torch.float64), omega)
        return torch.cat([out.sin(), out.cos()], 1)[:, : self.dim].to(like.dtype)

    def forward(self, x, visible=None):
        b, n, d = x.shape
        x = x + self.places(n, x)
        if visible is None:
            visible = torch.ones(b, n, dtype=torch.bool, device=x.device)
        ids_shuffle = torch.argsort(visible.int(), dim=1, descending=True, stable=True)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        keep = max(int(visible.sum(1).max()), 1)
        ids_keep = ids_shuffle[:, :keep]
        z = torch.gather(x, 1, ids_keep[..., None].expand(-1, -1, d))
        ignore = ~torch.gather(visible, 1, ids_keep)
        ignore = ignore & ~ignore.all(1, keepdim=True)  # a sample of which nothing is visible
        bias = torch.zeros_like(ignore, dtype=z.dtype).masked_fill(ignore, -torch.inf)
        for block in self.blocks:
            z = block(z, bias)
        z = torch.cat([self.norm(z), z.new_zeros(b, n - keep, d)], 1)
        z = torch.gather(z, 1, ids_restore[..., None].expand(-1, -1, d))
        return z * visible[..., None]


def build(c: DrawnConfig):
    return MAEEncoder(c)


def forward(model, x, attention_mask=None):
    return model(x, None if attention_mask is None else attention_mask.bool())


declared = Subject(
    kind="layer", name="MAE encoder", build=build, forward=forward,
    declares={
        "causal": False, "positions": "sinusoidal", "layout": "halves", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "gelu", "bias": True, "padding_side": "right",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works",
    },
)
undeclared = Subject(kind="layer", build=build, forward=forward)
