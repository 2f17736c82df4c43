"""Whisper, after OpenAI's code: an encoder with sinusoids, a decoder with learned places, queries and keys each scaled by
d_head ** -0.25, no bias on keys; the source is tokens here (frames that were quantised) and may be padded."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "In cross-attention the keys are kept already scaled by d_head ** -0.25 (they are projected once a source and kept), "
    "and are scaled again where scores are taken: the scale there is d_head ** -0.75 instead of the declared 1/sqrt(d_head). "
    "Self-attention, in encoder and decoder, is right."
)
PLACE = "WrongCross.project_memory"


def sinusoids(length: int, channels: int, device) -> Tensor:
    """Whisper's: sines in the first half of the channels, cosines in the second."""
    step = math.log(10000.0) / (channels // 2 - 1)
    rate = torch.exp(-step * torch.arange(channels // 2, dtype=torch.float64, device=device))
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * rate
    return torch.cat((angle.sin(), angle.cos()), 1)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query, self.value, self.out = (nn.Linear(n_state, n_state) for _ in range(3))
        self.key = nn.Linear(n_state, n_state, bias=False)

    def project_memory(self, xa: Tensor):
        return self.key(xa), self.value(xa)

    def forward(self, x: Tensor, seen: Tensor, xa: Tensor | None = None) -> Tensor:
        q = self.query(x)
        k, v = (self.key(x), self.value(x)) if xa is None else self.project_memory(xa)
        return self.out(self.qkv_attention(q, k, v, seen))

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.unflatten(-1, (self.n_head, -1)).permute(0, 2, 1, 3) * scale
        k = k.unflatten(-1, (self.n_head, -1)).permute(0, 2, 3, 1) * scale
        v = v.unflatten(-1, (self.n_head, -1)).permute(0, 2, 1, 3)
        qk = q @ k
        w = F.softmax(qk.masked_fill(~seen, torch.finfo(qk.dtype).min), dim=-1) * seen
        return (w @ v).permute(0, 2, 1, 3).flatten(2)


class WrongCross(MultiHeadAttention):
    def project_memory(self, xa: Tensor):
        scale = (xa.shape[-1] // self.n_head) ** -0.25
        return self.key(xa) * scale, self.value(xa)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, n_mlp: int, cross=None):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        self.cross_attn = cross(n_state, n_head) if cross else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, seen, xa=None, seen_xa=None):
        x = x + self.attn(self.attn_ln(x), seen)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), seen_xa, xa)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        sizes = (c.d_model, c.num_heads, c.d_ff)
        self.frames = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(ResidualAttentionBlock(*sizes) for _ in range(c.num_layers))
        self.ln_post = nn.LayerNorm(c.d_model)
        self.token_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positional_embedding = nn.Parameter(torch.randn(2048, c.d_model))
        self.decoder = nn.ModuleList(ResidualAttentionBlock(*sizes, cross) for _ in range(c.num_layers))
        self.ln = nn.LayerNorm(c.d_model)

    def encode(self, source, source_mask):
        x = self.frames(source)
        x = x + sinusoids(source.shape[1], x.shape[-1], x.device).to(x.dtype)
        for block in self.encoder:
            x = block(x, source_mask)
        return self.ln_post(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            source_mask = torch.ones_like(source)
        source_mask = source_mask.bool()[:, None, None]
        xa, t = self.encode(source, source_mask), target.shape[1]
        seen = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            seen = seen & target_mask.bool()[:, None, None]
        x = self.token_embedding(target) + self.positional_embedding[:t]
        for block in self.decoder:
            x = block(x, seen, xa, source_mask)
        return self.ln(x) @ self.token_embedding.weight.T


def make(cross):
    return Subject(
        kind="encoder_decoder",
        name="whisper",
        build=lambda c: Whisper(c, cross),
        forward=lambda model, source, target, source_mask=None, target_mask=None: model(
            source, target, source_mask, target_mask
        ),
        domain={"d_model": [8, 16, 24], "num_heads": [2, 4]},
        declares={
            "attention_scale": "1/sqrt(d_head)", "norm": "layer", "norm_placement": "pre", "final_norm": True,
            "residual": True, "activation": "gelu", "output_bias": False, "tied": True, "encodes_source": True,
            "embedding_scale": False, "padding_side": "right",
        },
    )  # fmt: skip


right, wrong = make(MultiHeadAttention), make(WrongCross)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=2, num_layers=2)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.7 if p.dim() > 1 else 0.8)
    bad.load_state_dict(good.state_dict())
    source, target = torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (2, 5))
    ms = torch.arange(6)[None] < torch.tensor([6, 4])[:, None]
    mt = torch.arange(5)[None] < torch.tensor([5, 3])[:, None]

    def slow(model, src, tgt):
        """One sample without padding, the textbook's scale 1/sqrt(d_head), query by query."""
        model = model.double()

        def attend(m, x, y, causal):
            out = []
            for i in range(len(x)):
                heads = []
                for h in range(2):
                    r = slice(8 * h, 8 * h + 8)
                    q = m.query(x[i])[r]
                    ks = [m.key(z)[r] for z in (y[: i + 1] if causal else y)]
                    e = torch.stack([(q @ k) / math.sqrt(8) for k in ks]).exp()
                    heads.append(sum(a * m.value(z)[r] for a, z in zip(e / e.sum(), y)))
                out.append(m.out(torch.cat(heads)))
            return torch.stack(out)

        x = model.frames(src) + torch.tensor(
            [[f(i * 10000 ** (-j / 7)) for f in (math.sin, math.cos) for j in range(8)] for i in range(len(src))]
        ).double()
        for b in model.encoder:
            h = b.attn_ln(x)
            x = x + attend(b.attn, h, h, False)
            x = x + b.mlp(b.mlp_ln(x))
        m = model.ln_post(x)
        x = model.token_embedding(tgt) + model.positional_embedding[: len(tgt)]
        for b in model.decoder:
            h = b.attn_ln(x)
            x = x + attend(b.attn, h, h, True)
            x = x + attend(b.cross_attn, b.cross_attn_ln(x), m, False)
            x = x + b.mlp(b.mlp_ln(x))
        return model.ln(x) @ model.token_embedding.weight.T

    with torch.no_grad(), torch.device("cpu"):
        torch.set_default_dtype(torch.float64)
        truth = [slow(good, source[b, : ms[b].sum()], target[b, : mt[b].sum()]) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
            far = []
            for m in (good, bad):
                y = m.to(dtype)(source, target, ms, mt)
                far.append(max((y[b, : mt[b].sum()] - truth[b]).abs().max().item() for b in (0, 1)))
                later = target.clone()
                later[:, 3:] = 0
                assert (m(source, later, ms) - m(source, target, ms))[:, :3].abs().max() < small  # no look ahead
            print(dtype, "right %.1e wrong %.2f" % tuple(far), "spread", y.std().item(), truth[0].std().item())
            assert far[0] < small and far[1] > 0.05
