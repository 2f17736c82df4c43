import torch
import torch.nn as nn
from veriformer.properties import Subject


class SequenceClassifier(nn.Module):
    """A causal backbone, whose last real token is classified."""

    def __init__(self, vocab, hidden, heads, layers, inner, max_len, classes):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, hidden), nn.Embedding(max_len, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, inner, 0.0, "gelu", batch_first=True, norm_first=True)
        self.backbone = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(hidden), enable_nested_tensor=False)
        self.score = nn.Linear(hidden, classes, bias=False)

    def forward(self, input_ids, attention_mask=None):
        B, T = input_ids.shape
        x = self.tok(input_ids) + self.pos.weight[:T]
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        x = self.backbone(x, mask=future)
        if attention_mask is None:
            last = torch.full((B,), T - 1, device=x.device)
        else:
            last = (attention_mask.long().sum(-1) - 1).clamp(min=0)
        pooled = x[torch.arange(B, device=x.device), last]
        return self.score(pooled)


subject = Subject(
    kind="classifier", name="last token",
    build=lambda c: SequenceClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "last", "padding_side": "right", "positions": "learned", "causal": True, "output_bias": False,
              "norm": "layer", "norm_placement": "pre", "activation": "gelu", "final_norm": True},
)
