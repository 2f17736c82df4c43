WHAT = 'the padding mask is lengthened for the class token at the end instead of the front, so that it is one off: the last real patch is hidden and the last padded one is seen (line 28: ignore = ~pad(valid, (0, 1), value=True))'
"""ViT-style classifier over VQ image codes, with a class token. PyTorch's own encoder does the work."""
import torch
from torch import nn
from torch.nn.functional import pad

from veriformer.properties import Subject


class VQViT(nn.Module):
    def __init__(self, codes, width, heads, depth, mlp, max_len, classes):
        super().__init__()
        self.code_embed = nn.Embedding(codes, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, max_len + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, mlp, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, codes, valid=None):
        B, N = codes.shape
        if N >= self.pos_embed.shape[1]:
            raise ValueError("too many patches")
        x = torch.cat([self.cls_token.expand(B, -1, -1), self.code_embed(codes)], dim=1)
        x = x + self.pos_embed[:, : N + 1]
        ignore = None
        if valid is not None:
            ignore = ~pad(valid, (0, 1), value=True)
        x = self.encoder(x, src_key_padding_mask=ignore)
        return self.head(x[:, 0])


subject = Subject(
    kind="classifier",
    name="VQ-ViT",
    build=lambda c: VQViT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "cls", "extra_tokens": 1, "norm": "layer",
              "norm_placement": "pre", "final_norm": True, "activation": "gelu", "padding_side": "right"},
)
