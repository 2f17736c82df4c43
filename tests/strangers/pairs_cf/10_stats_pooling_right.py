import torch
from torch import nn

from veriformer.properties import Subject


class SpeakerClassifier(nn.Module):
    def __init__(self, codes, dim, heads, depth, hidden, classes, max_len):
        super().__init__()
        self.embed = nn.Embedding(codes, dim)
        self.pos = nn.Parameter(torch.randn(max_len, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, codes, mask=None):
        if mask is None:
            mask = torch.ones_like(codes, dtype=torch.bool)
        x = self.embed(codes) + self.pos[: codes.size(1)]
        x = self.trunk(x, src_key_padding_mask=~mask)
        w = mask.unsqueeze(-1).to(x.dtype)
        w = w / w.sum(1, keepdim=True)
        mean = (x * w).sum(1)
        spread = ((x - mean[:, None]).square() * w).sum(1)
        return self.head(torch.cat([mean, (spread + 1e-5).sqrt()], dim=-1))


subject = Subject(
    kind="classifier",
    name="speaker classifier",
    build=lambda c: SpeakerClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "relu", "pooling": "other", "padding_side": "right", "structure": "other"},
)
