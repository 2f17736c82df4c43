WHAT = "muP: scores over d_head, logits over the width multiple, queries and residual projections start at zero (the fresh model ignores its context), norms without gain, squared ReLU, positions counted from the mask"
import torch
from torch import nn
from torch.nn import functional as F

BASE_WIDTH = 8


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)
        for zero in (self.q, self.o, self.down):
            nn.init.zeros_(zero.weight)

    def forward(self, x, seen):
        B, T, D = x.shape
        n = F.rms_norm(x, (D,), eps=1e-6)
        q, k, v = (f(n).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.transpose(-1, -2) / (D // self.h)
        w = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1)
        x = x + self.o((w @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (D,), eps=1e-6))).square())


class MuGPT(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.d = d
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList(Block(d, h, ff) for _ in range(layers))
        self.readout = nn.Linear(d, vocab, bias=False)

    def forward(self, ids, mask=None):
        T = ids.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool, device=ids.device).tril()
        place = torch.arange(T, device=ids.device)[None]
        if mask is not None:
            seen = seen & mask[:, None, None]
            place = (mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.wte(ids) + self.wpe(place)
        for block in self.blocks:
            x = block(x, seen)
        return self.readout(F.rms_norm(x, (self.d,), eps=1e-6)) * (BASE_WIDTH / self.d)


from veriformer.properties import Subject


def build(c):
    return MuGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="mup", build=build, forward=forward,
    declares={"positions": "learned", "attention_scale": "1/d_head", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "activation": "other", "bias": False, "output_bias": False, "tied": False, "structure": "other", "init": "other",
              "padding_side": "both", "beyond_max_len": "error"},
)
