WHAT = "The residual of the feed-forward sublayer is saved after the normalization, so the stream carries normed values past it (line 33)"
"""A pre-LN encoder, written with einsum."""
import torch
from torch import einsum, nn

from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.h = h
        self.norm_att, self.norm_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.act, self.drop = nn.GELU(), nn.Dropout(p)

    def attend(self, x, mask):
        q, k, v = (z.unflatten(-1, (self.h, -1)) for z in self.qkv(x).chunk(3, dim=-1))
        scores = einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out(einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))

    def mlp(self, x):
        return self.down(self.act(self.up(x)))

    def forward(self, x, mask=None):
        residual = x
        x = self.norm_att(x)
        x = residual + self.drop(self.attend(x, mask))
        x = self.norm_mlp(x)
        residual = x
        return residual + self.drop(self.mlp(x))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(
            EncoderBlock(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)
        )
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="encoder",
    build=Encoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "residual": True, "padding_side": "right"},
)
