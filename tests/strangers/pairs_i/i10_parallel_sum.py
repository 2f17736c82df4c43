"""A PaLM-like decoder as lucidrains writes them: parallel attention and SwiGLU from one fused projection, one key-value
head, rotary positions, a LayerNorm without bias, tied embeddings. Hardly anything is declared."""

import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The parallel block adds the residual twice: attention's branch has been wrapped with its own `x +`, and the block adds "
    "x once more, so that a layer returns 2x + attention + feed-forward. After L layers the embedding weighs 2**L, and the "
    "branches of the last layer count little; the final norm hides the size."
)
PLACE = "WrongBlock.forward"


def heads_first(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class LayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma)


class ParallelBlock(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        self.heads, self.dim_head = heads, dim // heads
        self.sizes = (dim, self.dim_head, self.dim_head, inner, inner)
        self.norm = LayerNorm(dim)
        self.fused_attn_ff_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.attn_out, self.ff_out = nn.Linear(dim, dim, bias=False), nn.Linear(inner, dim, bias=False)

    def rotate(self, x):
        rate = 10000.0 ** (-torch.arange(0, self.dim_head, 2, dtype=torch.float64, device=x.device) / self.dim_head)
        angle = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * rate
        cos, sin = (f.to(x.dtype).repeat(1, 2) for f in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def branches(self, x, seen):
        q, k, v, up, gate = self.fused_attn_ff_proj(self.norm(x)).split(self.sizes, -1)
        q, k = self.rotate(heads_first(q, self.heads)) * self.dim_head**-0.5, self.rotate(k)
        sim = einsum("b h i d, b j d -> b h i j", q, k)
        attn = sim.masked_fill(~seen, -torch.finfo(sim.dtype).max).softmax(-1) * seen
        out = einsum("b h i j, b j d -> b i h d", attn, v).flatten(2)
        return self.attn_out(out), self.ff_out(F.silu(gate) * up)

    def forward(self, x, seen):
        attention, feed_forward = self.branches(x, seen)
        return x + attention + feed_forward


class WrongBlock(ParallelBlock):
    def forward(self, x, seen):
        attention, feed_forward = self.branches(x, seen)
        attention = x + attention
        return x + attention + feed_forward


class PaLM(nn.Module):
    def __init__(self, c, block):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        n = tokens.shape[1]
        seen = ~torch.ones(n, n, dtype=torch.bool, device=tokens.device).triu(1)
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None]
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, seen)
        return einsum("b n d, v d -> b n v", self.norm(x), self.emb.weight)


def make(block):
    return Subject(
        kind="decoder",
        name="palm",
        build=lambda c: PaLM(c, block),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"d_model": [8, 16], "num_heads": [2, 4]},
    )


right, wrong = make(ParallelBlock), make(WrongBlock)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=2, num_layers=3)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.4 if p.dim() > 1 else 1.0)
    bad.load_state_dict(good.state_dict())
    w = {k: v.double() for k, v in good.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:] = False
    mask[1, :2] = False

    def slow(row):
        x = w["emb.weight"][row]
        turn = torch.exp(1j * torch.arange(len(row))[:, None] * 10.0 ** -torch.arange(4).double())
        for l in range(3):
            p = f"blocks.{l}."
            h = F.layer_norm(x, (16,), w[p + "norm.gamma"])
            f = w[p + "fused_attn_ff_proj.weight"]
            k, v = h @ f[16:24].T, h @ f[24:32].T
            k = (k[:, :4] + 1j * k[:, 4:]) * turn
            out = []
            for i in range(2):
                q = h @ f[8 * i : 8 * i + 8].T
                q = (q[:, :4] + 1j * q[:, 4:]) * turn
                scores = (q @ k.mH).real / 8**0.5
                scores = scores + torch.full_like(scores, -torch.inf).triu(1)
                out.append(scores.softmax(-1) @ v)
            up, gate = h @ f[32:52].T, h @ f[52:].T
            x = x + torch.cat(out, 1) @ w[p + "attn_out.weight"].T + (gate * gate.sigmoid() * up) @ w[p + "ff_out.weight"].T
        return F.layer_norm(x, (16,), w["norm.gamma"]) @ w["emb.weight"].T

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        far = []
        for m in (good, bad):
            y = m.to(dtype)(tokens, mask)
            far.append(max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1)))
            assert (m(tokens[:, :5]) - m(tokens)[:, :5]).abs().max() < small
            print(dtype, "spread", y.std().item())
        print(dtype, "right %.1e wrong %.2f" % tuple(far))
        assert far[0] < small and far[1] > 0.1
