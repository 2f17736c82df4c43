"""An encoder-decoder without a norm at the encoder's end: each cross-attention normalises queries and memory itself, as
Perceiver IO and x-transformers (`norm_context`) do. Learned relative biases per distance, clipped, keep order."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Cross-attention projects its keys from the normalised memory and its values from the memory as it came: what is read "
    "from the source grows with the size of the encoder's residual stream, layer by layer, where the pre-LN design has "
    "every projection read something normalised. Weights of attention and all shapes are right."
)
PLACE = "WrongCross.read"
CLIP = 5


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).movedim(-2, 1)


def attend(q, k, v, seen, bias=None):
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
    return (weights @ v).movedim(1, -2).flatten(-2)


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(d)
        self.to_qkv, self.to_out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.near = nn.Parameter(torch.randn(heads, 2 * CLIP + 1))

    def forward(self, x, seen):
        q, k, v = (split(y, self.heads) for y in self.to_qkv(self.norm(x)).chunk(3, -1))
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.near[:, (at[None] - at[:, None]).clamp(-CLIP, CLIP) + CLIP]
        return self.to_out(attend(q, k, v, seen, bias))


class CrossAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_context = nn.LayerNorm(d), nn.LayerNorm(d)
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.to_out = nn.Linear(d, d)

    def read(self, memory):
        memory = self.norm_context(memory)
        return self.to_k(memory), self.to_v(memory)

    def forward(self, x, memory, seen):
        k, v = self.read(memory)
        return self.to_out(attend(*(split(y, self.heads) for y in (self.to_q(self.norm(x)), k, v)), seen))


class WrongCross(CrossAttention):
    def read(self, memory):
        return self.to_k(self.norm_context(memory)), self.to_v(memory)


class FeedForward(nn.Sequential):
    def __init__(self, d, inner):
        super().__init__(nn.LayerNorm(d), nn.Linear(d, inner), nn.GELU(), nn.Linear(inner, d))


class Seq2Seq(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        d, h = c.d_model, c.num_heads
        self.source, self.target = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.encoder = nn.ModuleList(
            nn.ModuleList((SelfAttention(d, h), FeedForward(d, c.d_ff))) for _ in range(c.num_layers)
        )
        self.decoder = nn.ModuleList(
            nn.ModuleList((SelfAttention(d, h), cross(d, h), FeedForward(d, c.d_ff))) for _ in range(c.num_layers)
        )
        self.norm, self.logits = nn.LayerNorm(d), nn.Linear(d, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        real = torch.ones_like(source) if source_mask is None else source_mask
        real = real.bool()[:, None, None]
        past = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            past = past & target_mask.bool()[:, None, None]
        memory = self.source(source)
        for attention, feed_forward in self.encoder:
            memory = memory + attention(memory, real)
            memory = memory + feed_forward(memory)
        x = self.target(target)
        for attention, cross, feed_forward in self.decoder:
            x = x + attention(x, past)
            x = x + cross(x, memory, real)
            x = x + feed_forward(x)
        return self.logits(self.norm(x))


def make(cross):
    return Subject(
        kind="encoder_decoder",
        name="encoder-decoder with norm_context",
        build=lambda c: Seq2Seq(c, cross),
        forward=lambda model, source, target, source_mask=None, target_mask=None: model(
            source, target, source_mask, target_mask
        ),
        declares={
            "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "gelu", "positions": "relative",
            "padding_side": "both", "tied": False, "structure": "other",
        },
    )  # fmt: skip


right, wrong = make(CrossAttention), make(WrongCross)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=2, num_layers=2)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.4 if p.dim() > 1 else 0.8)
    bad.load_state_dict(good.state_dict())
    source, target = torch.randint(0, 11, (2, 7)), torch.randint(0, 11, (2, 6))
    ms, mt = torch.ones(2, 7, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool)
    ms[1, :3], mt[0, :1], mt[1, 4:] = False, False, False

    def slow(model, src, tgt):
        def one(m, x, memory, causal, bias):
            """Position by position; every projection reads a normalised vector."""
            rows = []
            for i, row in enumerate(x):
                keys = memory[: i + 1] if causal else memory
                heads = []
                for h in range(2):
                    r = slice(6 * h, 6 * h + 6)
                    if bias:
                        wq, wk, wv = m.to_qkv.weight.chunk(3)
                        q, ks = wq[r] @ m.norm(row), [wk[r] @ m.norm(y) for y in keys]
                        vs = [wv[r] @ m.norm(y) for y in keys]
                    else:
                        q = m.to_q.weight[r] @ m.norm(row)
                        ks = [m.to_k.weight[r] @ m.norm_context(y) for y in keys]
                        vs = [m.to_v.weight[r] @ m.norm_context(y) for y in keys]
                    near = [m.near[h, max(-CLIP, min(CLIP, j - i)) + CLIP] if bias else 0.0 for j in range(len(keys))]
                    e = torch.stack([q @ k / 6**0.5 + n for k, n in zip(ks, near)]).softmax(0)
                    heads.append((e[:, None] * torch.stack(vs)).sum(0))
                rows.append(m.to_out(torch.cat(heads)))
            return torch.stack(rows)

        memory = model.source(src)
        for a, f in model.encoder:
            memory = memory + one(a, memory, memory, False, True)
            memory = memory + f(memory)
        x = model.target(tgt)
        for a, b, f in model.decoder:
            x = x + one(a, x, x, True, True)
            x = x + one(b, x, memory, False, False)
            x = x + f(x)
        return model.logits(model.norm(x))

    with torch.no_grad():
        truth = [slow(good.double(), source[b][ms[b]], target[b][mt[b]]) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            far = []
            for m in (good, bad):
                y = m.to(dtype)(source, target, ms, mt)
                far.append(max((y[b][mt[b]] - truth[b]).abs().max().item() for b in (0, 1)))
                assert (m(source, target[:, :3]) - m(source, target)[:, :3]).abs().max() < small
                print(dtype, "spread", y.std().item())
            print(dtype, "right %.1e wrong %.2f" % tuple(far))
            assert far[0] < small and far[1] > 0.1
