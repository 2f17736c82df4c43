"""A decoder whose blocks are compiled by torch.jit.script; ALiBi with slopes of any number of heads."""
import math
import warnings
from typing import List, Optional

import torch
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject


def slopes(n: int) -> List[float]:
    if math.log2(n).is_integer():
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    near = 2 ** math.floor(math.log2(n))
    return slopes(near) + slopes(2 * near)[0::2][: n - near]


class Block(nn.Module):
    def __init__(self, d: int, h: int, f: int):
        super().__init__()
        self.h: int = h
        self.k: int = d // h
        self.q = nn.Linear(d, d)
        self.kv = nn.Linear(d, 2 * d)
        self.o = nn.Linear(d, d)
        self.a = nn.LayerNorm(d)
        self.b = nn.LayerNorm(d)
        self.up = nn.Linear(d, f)
        self.down = nn.Linear(f, d)
        self.slopes: List[float] = slopes(h)

    def forward(self, x: Tensor, mask: Optional[Tensor]) -> Tensor:
        n, t, d = x.shape
        y = self.a(x)
        q = self.q(y).view(n, t, self.h, self.k).transpose(1, 2)
        k, v = self.kv(y).view(n, t, 2, self.h, self.k).permute(2, 0, 3, 1, 4).unbind(0)
        s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.k)
        i = torch.arange(t, device=x.device)
        gap = (i[None, :] - i[:, None]).to(x.dtype)
        s = s + torch.tensor(self.slopes, dtype=x.dtype, device=x.device)[:, None, None] * gap
        hidden = (i[None, :] > i[:, None])[None, None]
        if mask is not None:
            hidden = hidden | torch.logical_not(mask)[:, None, None, :]
        s = s.masked_fill(hidden, -1e4 if x.dtype == torch.float16 else -1e30)
        y = torch.matmul(torch.softmax(s, -1), v).transpose(1, 2).reshape(n, t, d)
        x = x + self.o(y)
        return x + self.down(torch.relu(self.up(self.b(x))))


class Decoder(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.blocks = nn.ModuleList(
                [torch.jit.script(Block(c.d_model, c.num_heads, c.d_ff)) for _ in range(c.num_layers)]
            )
        self.norm = nn.LayerNorm(c.d_model)
        self.out = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, mask=None):
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.out(self.norm(x))


def forward(model, tokens, attention_mask=None):
    return model(tokens, None if attention_mask is None else attention_mask.bool())


declared = Subject(
    kind="decoder", name="scripted decoder", build=Decoder, forward=forward,
    declares={
        "causal": True, "positions": "alibi", "slopes": "interleaved", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "relu", "bias": True, "output_bias": True, "tied": False,
        "padding_side": "both", "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works",
        "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=Decoder, forward=forward)
