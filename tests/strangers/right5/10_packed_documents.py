WHAT = "token 0 ends a document: tokens see their own document alone (packed training), with positions that begin anew in each; the mask depends on the tokens"
import torch
from torch import nn
from torch.nn import functional as F

END = 0


class Block(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h, self.p = h, p
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d), nn.Dropout(p))

    def forward(self, x, bias):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, bias, self.p if self.training else 0.0)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x))


class Packed(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, p):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList(Block(d, h, ff, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        if mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=ids.device)
        end = (ids == END) & mask
        document = end.long().cumsum(1) - end.long()  # the end belongs to what it ends
        count = mask.long().cumsum(1) - 1  # real tokens so far
        first = torch.cat([torch.ones_like(end[:, :1]), end[:, :-1]], 1)
        start = torch.where(first, count + (~mask).long(), 0).cummax(1).values  # a start that is hidden: the next real one
        place = (count - start).clamp(min=0)
        seen = (document[:, :, None] == document[:, None, :]) & mask[:, None, :]
        seen = seen & torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        x = self.wte(ids) + self.wpe(place)
        bias = torch.zeros(B, 1, T, T, dtype=x.dtype, device=x.device)
        bias = bias.masked_fill(~seen[:, None], torch.finfo(x.dtype).min / 2)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


from veriformer.properties import Subject


def build(c):
    return Packed(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="packed documents", build=build, forward=forward,
    declares={"sparse": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "tied": False, "bias": True, "output_bias": False, "padding_side": "both"},
)
