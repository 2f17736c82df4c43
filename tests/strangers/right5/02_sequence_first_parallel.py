WHAT = "sequence-first [T, B, D] inside with baddbmm, GPT-J parallel block under one norm, 2 rotary channels of each head, scripted activation, untied head with bias"
import torch
from torch import Tensor, nn


@torch.jit.script
def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    x = y + bias
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


ROT = 2


def rotate(x, angles):  # x [T, N, K], angles [T]: the channels 0 and 1 turn
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x[..., 0], x[..., 1]
    return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1), x[..., ROT:]], -1)


class Block(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h, self.k = h, d // h
        self.ln = nn.LayerNorm(d)
        self.q, self.kk, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.up_bias = nn.Linear(d, ff, bias=False), nn.Parameter(torch.zeros(ff))
        self.down = nn.Linear(ff, d)
        self.drop = nn.Dropout(p)

    def forward(self, x, hidden):  # x [T, B, D], hidden [B, T, T]: True = not seen
        T, B, D = x.shape
        n = self.ln(x)
        angles = torch.arange(T, device=x.device, dtype=torch.float64)
        q, k, v = (f(n).view(T, B * self.h, self.k) for f in (self.q, self.kk, self.v))
        q, k = rotate(q, angles), rotate(k, angles)
        bias = torch.zeros(B, 1, T, T, dtype=x.dtype, device=x.device)
        bias = bias.masked_fill(hidden[:, None], torch.finfo(x.dtype).min / 2)
        bias = bias.expand(B, self.h, T, T).reshape(B * self.h, T, T)
        scores = torch.baddbmm(bias, q.transpose(0, 1), k.permute(1, 2, 0), beta=1.0, alpha=self.k**-0.5)
        mixed = torch.bmm(self.drop(scores.softmax(-1)), v.transpose(0, 1))
        attended = self.o(mixed.transpose(0, 1).reshape(T, B, D))
        return x + self.drop(attended + self.down(bias_gelu(self.up(n), self.up_bias)))


class GPTJ(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.wte = nn.Embedding(vocab, d)
        self.h = nn.ModuleList(Block(d, h, ff, p) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        hidden = torch.ones(T, T, dtype=torch.bool, device=ids.device).triu(1).expand(B, T, T)
        if mask is not None:
            hidden = hidden | ~mask[:, None, :]
        x = self.wte(ids.t())
        for block in self.h:
            x = block(x, hidden)
        return self.head(self.ln_f(x)).transpose(0, 1)


from veriformer.properties import Subject


def build(c):
    return GPTJ(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="decoder", build=build, forward=forward)
declared = Subject(
    kind="decoder", name="sequence-first gpt-j", build=build, forward=forward,
    declares={"positions": "rotary", "rotary_dim": 2, "layout": "interleaved", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "tied": False, "output_bias": True, "activation": "gelu_tanh", "structure": "other",
              "padding_side": "both", "beyond_max_len": "works"},
)
