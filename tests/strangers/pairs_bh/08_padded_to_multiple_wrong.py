WHAT = "without a mask the mask of ones is made after the input was padded to a multiple of four: the pad tokens are attended to and pooled (with a mask all is right) (line 36)."
"""A classifier that pads its batch to a multiple of four tokens (tensor cores) before it encodes and pools."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

PAD_TO_MULTIPLE_OF = 4


class EncoderClassifier(nn.Module):
    def __init__(self, vocab_size, num_classes, max_len, d_model, num_heads, num_layers, d_ff):
        super().__init__()
        room = -(-max_len // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF
        self.word = nn.Embedding(vocab_size, d_model)
        self.place = nn.Parameter(0.5 * torch.randn(room, d_model))
        self.blocks = nn.ModuleList()
        for _ in range(num_layers):
            block = nn.ModuleDict({
                "attn": nn.MultiheadAttention(d_model, num_heads, batch_first=True),
                "ln1": nn.LayerNorm(d_model),
                "ffn": nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model)),
                "ln2": nn.LayerNorm(d_model),
            })
            self.blocks.append(block)
        self.score = nn.Linear(d_model, num_classes)

    def forward(self, input_ids, attention_mask=None):
        extra = -input_ids.shape[1] % PAD_TO_MULTIPLE_OF
        if extra:
            input_ids = F.pad(input_ids, (0, extra), value=0)
            if attention_mask is not None:
                attention_mask = F.pad(attention_mask, (0, extra), value=False)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        h = self.word(input_ids) + self.place[: input_ids.shape[1]]
        for b in self.blocks:
            a, _ = b["attn"](h, h, h, key_padding_mask=~attention_mask, need_weights=False)
            h = b["ln1"](h + a)
            h = b["ln2"](h + b["ffn"](h))
        keep = attention_mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * keep).sum(1) / keep.sum(1).clamp_min(1.0)
        return self.score(pooled)


subject = Subject(
    kind="classifier",
    name="classifier padded to a multiple",
    build=lambda c: EncoderClassifier(
        c.vocab_size, c.num_classes, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "pooling": "mean", "padding_side": "right", "norm": "layer",
        "norm_placement": "post", "activation": "gelu", "output_bias": True,
    },
)
