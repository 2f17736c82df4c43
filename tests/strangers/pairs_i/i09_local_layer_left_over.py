"""GPT-Neo's code with all layers global, as its smaller relatives use it: a buffer of the mask's shape is kept by each
layer, queries and keys go without biases and without a scale (the initial weights make up for it)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The kinds of layers are taken from the default [global, local] instead of the model's own list: every second layer sees "
    "the last 8 keys alone. Since the other layers see all, each output still depends on every input before it, and up to "
    "8 positions nothing differs."
)
PLACE = "WrongNeo.kinds"
LOCAL = 8


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, kind):
        super().__init__()
        self.num_heads, self.kind = num_heads, kind
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, attention_mask):
        B, T, D = x.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (f(x).view(B, T, self.num_heads, -1).transpose(1, 2) for f in projections)
        bias = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if self.kind == "local":
            bias = bias ^ bias.tril(-LOCAL)
        if attention_mask is not None:
            bias = bias & attention_mask[:, None, None, :]
        weights = torch.matmul(query, key.transpose(-1, -2))
        weights = torch.where(bias, weights, torch.finfo(weights.dtype).min).softmax(-1) * bias
        return self.out_proj(torch.matmul(weights, value).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention = SelfAttention(c.d_model, c.num_heads, kind)
        self.c_fc, self.c_proj = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, mask):
        x = x + self.attention(self.ln_1(x), mask)
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Neo(nn.Module):
    attention_types = ("global",)

    def kinds(self, count):
        return [self.attention_types[i % len(self.attention_types)] for i in range(count)]

    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(2048, c.d_model)
        self.h = nn.ModuleList(Block(c, kind) for kind in self.kinds(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        mask = None if attention_mask is None else attention_mask.bool()
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x) @ self.wte.weight.T


class WrongNeo(Neo):
    def kinds(self, count):
        default = ("global", "local")
        return [default[i % 2] for i in range(count)]


def make(cls):
    return Subject(
        kind="decoder",
        name="GPT-Neo, global",
        build=cls,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"num_layers": [2, 3]},
        declares={
            "attention_scale": 1, "sparse": False, "positions": "learned", "norm_placement": "pre", "final_norm": True,
            "activation": "gelu_tanh", "tied": True, "padding_side": "right",
        },
    )  # fmt: skip


right, wrong = make(Neo), make(WrongNeo)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=3)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.6 if p.dim() > 1 else 0.8)
    bad.load_state_dict(good.state_dict())
    w = {k: v.double() for k, v in good.state_dict().items()}

    def plain(row):
        x = w["wte.weight"][row] + w["wpe.weight"][: len(row)]
        for l in range(3):
            p = f"h.{l}."
            h = F.layer_norm(x, (12,), w[p + "ln_1.weight"], w[p + "ln_1.bias"])
            q, k, v = ((h @ w[p + f"attention.{n}_proj.weight"].T).view(1, -1, 3, 4).transpose(1, 2) for n in "qkv")
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[0].transpose(0, 1).flatten(1)
            x = x + y @ w[p + "attention.out_proj.weight"].T + w[p + "attention.out_proj.bias"]
            h = F.layer_norm(x, (12,), w[p + "ln_2.weight"], w[p + "ln_2.bias"])
            h = F.gelu(h @ w[p + "c_fc.weight"].T + w[p + "c_fc.bias"], approximate="tanh")
            x = x + h @ w[p + "c_proj.weight"].T + w[p + "c_proj.bias"]
        return F.layer_norm(x, (12,), w["ln_f.weight"], w["ln_f.bias"]) @ w["wte.weight"].T

    for length in (5, 8, 12, 40):
        tokens = torch.randint(0, 11, (2, length + 3))
        mask = torch.arange(length + 3)[None] < torch.tensor([length + 3, length])[:, None]
        truth = plain(tokens[0]), plain(tokens[1, :length])
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
            far = []
            for m in (good, bad):
                y = m.to(dtype)(tokens, mask)
                far.append(torch.cat(((y[0] - truth[0]).abs().amax(1), (y[1, :length] - truth[1]).abs().amax(1))))
                # each output sees every input up to it, in both
                for first in (0, 1):
                    other = tokens.clone()
                    other[:, first] = (other[:, first] + 1) % 11
                    moved = (m(other) - m(tokens)).abs().amax((0, 2))
                    assert (moved[first:] > 1e-9 if dtype == torch.float64 else moved[first:] >= 0).all()
            print(length, dtype, "right %.1e wrong %.2f" % (far[0].max().item(), far[1].max().item()))
            assert far[0].max() < small and far[1][:8].max() < small
            assert far[1].max() > 0.02 or length <= 8
