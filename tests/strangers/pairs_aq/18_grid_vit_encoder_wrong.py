WHAT = 'the column of a patch is its index modulo the height of the grid instead of the width: patches of different places (such as 0 and 3) get the same position and cannot be told apart (line 36: c = index % self.height)'
"""Encoder of a 3 x 4 grid of patch codes, with one learned table for rows and one for columns; a trained instance."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject


class GridEncoder(nn.Module):
    def __init__(self, codes=16, dim=16, heads=2, depth=2, hidden=32, height=3, width=4):
        super().__init__()
        self.height, self.width, self.heads = height, width, heads
        self.code = nn.Embedding(codes, dim)
        self.row, self.col = nn.Embedding(height, dim), nn.Embedding(width, dim)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "n1": nn.LayerNorm(dim),
                        "qkv": nn.Linear(dim, 3 * dim),
                        "proj": nn.Linear(dim, dim),
                        "n2": nn.LayerNorm(dim),
                        "mlp": nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)),
                    }
                )
            )
        self.norm = nn.LayerNorm(dim)

    def positions(self, n, device):
        if n > self.height * self.width:
            raise ValueError("more patches than places in the grid")
        index = torch.arange(n, device=device)
        r = torch.div(index, self.width, rounding_mode="floor")
        c = index % self.height
        return self.row(r) + self.col(c)

    def forward(self, codes, mask=None):
        x = self.code(codes) + self.positions(codes.shape[1], codes.device)
        B, N, D = x.shape
        allowed = None if mask is None else mask[:, None, None, :].expand(B, 1, N, N)
        for b in self.blocks:
            q, k, v = b["qkv"](b["n1"](x)).view(B, N, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
            x = x + b["proj"](y.transpose(1, 2).reshape(B, N, D))
            x = x + b["mlp"](b["n2"](x))
        return self.norm(x)


torch.manual_seed(18)

subject = Subject(
    kind="encoder",
    name="grid ViT",
    module=GridEncoder().eval(),
    config=DrawnConfig(
        vocab_size=16, d_model=16, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=32, max_len=12, dropout=0.0
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "max_len": 12, "beyond_max_len": "error", "norm": "layer",
              "norm_placement": "pre", "final_norm": True, "activation": "gelu", "padding_side": "right"},
)
