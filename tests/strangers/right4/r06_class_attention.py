"""CaiT with the conditional positions of CPVT: LayerScale on every branch, order by a depthwise convolution over the real
tokens, and a class token that joins only for two layers of class attention at the top.

Why it is right: the convolution is zero beyond the ends, and padding is set to zero before it, so that padding is such an end;
the class token attends to itself and to real tokens, and tokens never to it. Below: against loops in float64, with padding on both
sides; order matters (a reversed sequence gives other logits)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

CLASS_LAYERS = 2


class Mix(nn.Module):
    """Attention of queries x over keys y; LayerScale is the caller's."""

    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.proj = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, y, real):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in self.kv(y).chunk(2, -1))
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        weights = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.norm1, self.norm2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), Mix(d, c.num_heads)
        self.mlp = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))
        self.gamma_1, self.gamma_2 = nn.Parameter(torch.full((d,), 0.1)), nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x, real, cls=None):
        if cls is None:
            h = self.norm1(x)
            x = x + self.gamma_1 * self.attn(h, h, real)
        else:
            h = self.norm1(torch.cat((cls, x), 1))
            x = cls + self.gamma_1 * self.attn(h[:, :1], h, F.pad(real, (1, 0), value=True))
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class CaiT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.patches = nn.Embedding(c.vocab_size, c.d_model)
        self.peg = nn.Conv1d(c.d_model, c.d_model, 5, padding=2, groups=c.d_model)
        self.blocks = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.cls_token = nn.Parameter(torch.randn(1, 1, c.d_model))
        self.blocks_token_only = nn.ModuleList(Layer(c) for _ in range(CLASS_LAYERS))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.patches(tokens) * real[..., None]
        x = x + self.peg(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x, real)
        cls = self.cls_token.to(x.dtype).expand(len(x), -1, -1)
        for block in self.blocks_token_only:
            cls = block(x, real, cls)
        return self.head(self.norm(cls[:, 0]))


def make(**declares):
    return Subject(
        kind="classifier", name="CaiT", build=CaiT, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    )  # fmt: skip


declared = make(
    pooling="cls", extra_tokens=1, positions="other", norm="layer", norm_placement="pre", final_norm=True, residual=True,
    activation="gelu", bias=True, output_bias=True, attention_scale="1/sqrt(d_head)", padding_side="both",
    structure="other", embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3)
    model = CaiT(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.5)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:], mask[1, :3] = False, False

    def slow(row):
        def lin(x, n):
            return w[n + ".weight"] @ x + w[n + ".bias"]

        def norm(x, n):
            return F.layer_norm(x, (12,), w[n + ".weight"], w[n + ".bias"])

        def attend(x, ys, p):
            x, ys = norm(x, p + "norm1"), [norm(y, p + "norm1") for y in ys]
            q, kv, heads = lin(x, p + "attn.q"), [lin(y, p + "attn.kv") for y in ys], []
            for h in range(3):
                e = torch.stack([q[4 * h : 4 * h + 4] @ z[4 * h : 4 * h + 4] / 2 for z in kv]).softmax(0)
                heads.append(sum(a * z[12 + 4 * h : 16 + 4 * h] for a, z in zip(e, kv)))
            return w[p + "gamma_1"] * lin(torch.cat(heads), p + "attn.proj")

        def mlp(x, p):
            return x + w[p + "gamma_2"] * lin(F.gelu(lin(norm(x, p + "norm2"), p + "mlp.0")), p + "mlp.2")

        xs = list(w["patches.weight"][row])
        near = w["peg.weight"][:, 0]
        xs = [
            x + w["peg.bias"] + sum(near[:, j] * xs[i + j - 2] for j in range(5) if 0 <= i + j - 2 < len(xs))
            for i, x in enumerate(xs)
        ]
        for l in range(2):
            xs = [mlp(x + attend(x, xs, f"blocks.{l}."), f"blocks.{l}.") for x in xs]
        cls = w["cls_token"][0, 0]
        for l in range(CLASS_LAYERS):
            p = f"blocks_token_only.{l}."
            cls = mlp(cls + attend(cls, [cls, *xs], p), p)
        return lin(norm(cls, "norm"), "head")

    truth = torch.stack([slow(tokens[b][mask[b]]) for b in (0, 1)])
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        m = model.to(dtype)
        far = (m(tokens, mask) - truth).abs().max().item()
        order = (m(tokens) - m(tokens.flip(1))).abs().max().item()
        print(dtype, f"definition {far:.1e}, reversed {order:.2f}")
        assert far < small and order > 0.01
