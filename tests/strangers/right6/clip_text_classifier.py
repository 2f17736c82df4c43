"""CLIP's text tower, causal, read at the last real token; classes by cosine with learned class embeddings."""
from collections import OrderedDict

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, d_model, n_head, d_ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head)
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            OrderedDict(
                [("c_fc", nn.Linear(d_model, d_ff)), ("gelu", QuickGELU()), ("c_proj", nn.Linear(d_ff, d_model))]
            )
        )

    def forward(self, x):  # L N D
        mask = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype, device=x.device).triu_(1)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class CLIPText(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.token_embedding = nn.Embedding(c.vocab_size, d)
        self.positional_embedding = nn.Parameter(torch.randn(c.max_len, d) * 0.3)
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(d, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_final = nn.LayerNorm(d)
        self.text_projection = nn.Parameter(torch.randn(d, d) * d**-0.5)
        self.classes = nn.Parameter(torch.randn(c.num_classes, d))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def encode_text(self, text, mask):
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        x = self.ln_final(self.resblocks(x.permute(1, 0, 2)).permute(1, 0, 2))
        if mask is None:
            end = torch.full((len(x),), text.shape[1] - 1, device=text.device)
        else:
            place = torch.arange(text.shape[1], device=text.device)
            end = (place * mask.long()).argmax(-1)
        return x[torch.arange(len(x), device=x.device), end] @ self.text_projection

    def forward(self, text, mask=None):
        features = self.encode_text(text, mask)
        features = features / features.norm(dim=1, keepdim=True)
        prototypes = self.classes / self.classes.norm(dim=1, keepdim=True)
        return self.logit_scale.exp() * features @ prototypes.t()


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="classifier", name="CLIP text tower", build=CLIPText, forward=forward,
    declares={
        "pooling": "last", "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "residual": True, "activation": "other", "output_bias": False, "padding_side": "right",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "error", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="classifier", build=CLIPText, forward=forward)
