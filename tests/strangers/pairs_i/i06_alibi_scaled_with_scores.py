"""BLOOM in the style of the Hugging Face port: a fused projection with rows [head, 3, d_head], `baddbmm` that adds ALiBi,
a LayerNorm on the embeddings, a tied head. Falcon-RW is a neighbour that scales its ALiBi, BLOOM does not."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "`baddbmm` gets beta = 1/sqrt(d_head) for ALiBi, as Falcon has it, instead of 1: the slopes are smaller by sqrt(d_head) "
    "than those of the ALiBi that is declared, and distant tokens count far too much. Causality, shift and padding are right."
)
PLACE = "WrongBlock.beta"


def slopes(heads):
    """Slopes of the paper, also for head counts that are no power of two."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(first + extra, dtype=torch.float64)


class BloomBlock(nn.Module):
    beta = 1.0

    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.num_heads, self.head_dim = c.num_heads, d // c.num_heads
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)

    def forward(self, x, alibi, seen):
        b, t, d = x.shape
        fused = self.query_key_value(self.input_layernorm(x)).view(b, t, self.num_heads, 3, self.head_dim)
        q, k, v = (fused[..., i, :].transpose(1, 2).reshape(b * self.num_heads, t, -1) for i in range(3))
        scores = torch.baddbmm(alibi.to(q.dtype), q, k.transpose(1, 2), beta=self.beta, alpha=self.inv_norm_factor)
        scores = scores.view(b, self.num_heads, t, t)
        probs = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        context = torch.bmm(probs.flatten(0, 1), v).view(b, self.num_heads, t, -1).transpose(1, 2).reshape(b, t, d)
        x = x + self.dense(context)
        h = self.dense_h_to_4h(self.post_attention_layernorm(x))
        return x + self.dense_4h_to_h(F.gelu(h, approximate="tanh"))


class WrongBlock(BloomBlock):
    @property
    def beta(self):
        return self.inv_norm_factor


class Bloom(nn.Module):
    def __init__(self, c, block):
        super().__init__()
        self.heads = c.num_heads
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.word_embeddings_layernorm = nn.LayerNorm(c.d_model)
        self.h = nn.ModuleList(block(c) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        b, t = tokens.shape
        at = torch.arange(t, device=tokens.device)
        seen = (at[None] <= at[:, None])[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None]
        distance = (at[None] - at[:, None]).double().clamp(max=0)
        alibi = slopes(self.heads).to(tokens.device)[:, None, None] * distance
        alibi = alibi.expand(b, -1, -1, -1).flatten(0, 1)
        x = self.word_embeddings_layernorm(self.word_embeddings(tokens))
        for block in self.h:
            x = block(x, alibi, seen)
        return F.linear(self.ln_f(x), self.word_embeddings.weight)


def make(block):
    return Subject(
        kind="decoder",
        name="bloom",
        build=lambda c: Bloom(c, block),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"num_heads": [2, 3, 4], "d_model": [12, 24]},
        declares={
            "positions": "alibi", "attention_scale": "1/sqrt(d_head)", "norm": "layer", "norm_placement": "pre",
            "final_norm": True, "activation": "gelu_tanh", "bias": True, "tied": True, "padding_side": "both",
        },
    )  # fmt: skip


right, wrong = make(BloomBlock), make(WrongBlock)


if __name__ == "__main__":
    torch.manual_seed(0)
    for heads in (2, 3):
        c = DrawnConfig(d_model=24, num_heads=heads, num_layers=2)
        good, bad = right.build(c), wrong.build(c)
        with torch.no_grad():
            for p in good.parameters():
                p.normal_(0, 0.35 if p.dim() > 1 else 0.8)
        bad.load_state_dict(good.state_dict())
        table = {2: [1 / 16, 1 / 256], 3: [1 / 16, 1 / 256, 1 / 4]}[heads]
        tokens = torch.randint(0, 11, (2, 14))
        mask = torch.ones(2, 14, dtype=torch.bool)
        mask[1, :4] = False

        def slow(model, row):
            model = model.double()
            x = model.word_embeddings_layernorm(model.word_embeddings(row))
            for m in model.h:
                size = m.head_dim
                fused = m.query_key_value(m.input_layernorm(x))
                rows = []
                for t in range(len(row)):
                    parts = []
                    for h in range(heads):
                        q, k, v = (fused[:, (3 * h + j) * size : (3 * h + j + 1) * size] for j in range(3))
                        e = torch.stack([q[t] @ k[s] / size**0.5 - table[h] * (t - s) for s in range(t + 1)]).exp()
                        parts.append((e[:, None] * v[: t + 1]).sum(0) / e.sum())
                    rows.append(torch.cat(parts))
                x = x + m.dense(torch.stack(rows))
                x = x + m.dense_4h_to_h(F.gelu(m.dense_h_to_4h(m.post_attention_layernorm(x)), approximate="tanh"))
            return model.ln_f(x) @ model.word_embeddings.weight.T

        with torch.no_grad():
            truth = slow(good, tokens[0]), slow(good, tokens[1, 4:])
            for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
                far = []
                for m in (good, bad):
                    y = m.to(dtype)(tokens, mask)
                    far.append(max((y[0] - truth[0]).abs().max().item(), (y[1, 4:] - truth[1]).abs().max().item()))
                    assert (m(tokens[1:, 4:]) - y[1, 4:]).abs().max() < small  # both are shift invariant
                    assert (m(tokens[:, :6]) - m(tokens)[:, :6]).abs().max() < small  # and causal
                print(heads, dtype, "right %.1e wrong %.2f" % tuple(far))
                assert far[0] < small and far[1] > 0.05
