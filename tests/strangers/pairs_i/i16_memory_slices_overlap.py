"""A translation model that projects its memory once for all decoder layers, in one large matrix product, as inference
engines (CTranslate2, FasterTransformer) and in-house code do; each layer takes its slices. Nothing is declared."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Layer i takes its keys and values from rows i and i + 1 of the fused projection instead of 2i and 2i + 1: the keys of a "
    "layer are the values of the layer below, shared where nothing should be, and the rows of the upper layers are never "
    "read and never trained. With one layer it is right; shapes, masks and causality always are."
)
PLACE = "WrongModel.rows"


def rotary(x):
    """x [B, H, T, K], neighbouring channels are a pair."""
    size = x.shape[-1]
    rate = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
    angle = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def mix(q, k, v, seen):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, c, decoder):
        super().__init__()
        d = c.d_model
        self.heads = c.num_heads
        self.ln1, self.ln2, self.qkv, self.out = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)
        if decoder:
            self.ln_cross, self.q_cross, self.out_cross = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, seen, memory=None, real=None):
        q, k, v = (self.split(y) for y in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.out(mix(rotary(q), rotary(k), v, seen))
        if memory is not None:
            k, v = (self.split(y) for y in memory)
            x = x + self.out_cross(mix(self.split(self.q_cross(self.ln_cross(x))), k, v, real))
        return x + self.down(F.relu(self.up(self.ln2(x))))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(Layer(c, False) for _ in range(c.num_layers))
        self.encoder_norm = nn.LayerNorm(c.d_model)
        self.memory_kv = nn.Linear(c.d_model, 2 * c.num_layers * c.d_model, bias=False)
        self.decoder = nn.ModuleList(Layer(c, True) for _ in range(c.num_layers))
        self.decoder_norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def rows(self, layer):
        return 2 * layer, 2 * layer + 1

    def forward(self, source, target, source_mask=None, target_mask=None):
        real = torch.ones_like(source) if source_mask is None else source_mask
        real = real.bool()[:, None, None]
        x = self.tokens(source)
        for layer in self.encoder:
            x = layer(x, real)
        fused = self.memory_kv(self.encoder_norm(x)).unflatten(-1, (-1, x.shape[-1]))
        seen = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            seen = seen & target_mask.bool()[:, None, None]
        x = self.tokens(target)
        for i, layer in enumerate(self.decoder):
            x = layer(x, seen, [fused[..., row, :] for row in self.rows(i)], real)
        return self.head(self.decoder_norm(x))


class WrongModel(Model):
    def rows(self, layer):
        return layer, layer + 1


def make(cls):
    return Subject(
        kind="encoder_decoder",
        name="translation with a fused memory",
        build=cls,
        forward=lambda model, source, target, source_mask=None, target_mask=None: model(
            source, target, source_mask, target_mask
        ),
        domain={"d_model": [8, 16], "num_heads": [2, 4], "num_layers": [2, 3]},
    )


right, wrong = make(Model), make(WrongModel)


if __name__ == "__main__":
    torch.manual_seed(0)
    source, target = torch.randint(0, 11, (2, 7)), torch.randint(0, 11, (2, 6))
    ms, mt = torch.ones(2, 7, dtype=torch.bool), torch.ones(2, 6, dtype=torch.bool)
    ms[1, :3], mt[0, :1], mt[1, 4:] = False, False, False
    for layers in (1, 2, 3):
        c = DrawnConfig(d_model=8, num_heads=2, num_layers=layers)
        good, bad = right.build(c), wrong.build(c)
        with torch.no_grad():
            for p in good.parameters():
                p.normal_(0, 0.5 if p.dim() > 1 else 0.8)
        bad.load_state_dict(good.state_dict())
        w = {k: v.double() for k, v in good.state_dict().items()}

        def slow(src, tgt):
            """Each layer with projections of its own, rotation by complex numbers."""

            def lin(x, n):
                return x @ w[n + ".weight"].T + w[n + ".bias"]

            def norm(x, n):
                return F.layer_norm(x, (8,), w[n + ".weight"], w[n + ".bias"])

            def turned(x):
                z = torch.view_as_complex(x.reshape(len(x), -1, 2).contiguous())
                angle = torch.arange(len(x))[:, None] * torch.tensor([1, 0.01], dtype=torch.float64)
                return torch.view_as_real(z * torch.exp(1j * angle)).flatten(1)

            def attend(q, k, v, causal, rotate):
                out = []
                for h in range(2):
                    a, b, e = (y[:, 4 * h : 4 * h + 4] for y in (q, k, v))
                    a, b = (turned(a), turned(b)) if rotate else (a, b)
                    s = a @ b.T / 2
                    s = s + torch.full_like(s, -torch.inf).triu(1) if causal else s
                    out.append(s.softmax(-1) @ e)
                return torch.cat(out, 1)

            def stack(x, name, memory):
                for i in range(layers):
                    p = f"{name}.{i}."
                    q, k, v = lin(norm(x, p + "ln1"), p + "qkv").chunk(3, -1)
                    x = x + lin(attend(q, k, v, memory is not None, True), p + "out")
                    if memory is not None:
                        own = w["memory_kv.weight"][16 * i : 16 * i + 16]
                        q = lin(norm(x, p + "ln_cross"), p + "q_cross")
                        x = x + lin(attend(q, memory @ own[:8].T, memory @ own[8:].T, False, False), p + "out_cross")
                    x = x + lin(lin(norm(x, p + "ln2"), p + "up").relu(), p + "down")
                return x

            memory = norm(stack(w["tokens.weight"][src], "encoder", None), "encoder_norm")
            return lin(norm(stack(w["tokens.weight"][tgt], "decoder", memory), "decoder_norm"), "head")

        truth = [slow(source[b][ms[b]], target[b][mt[b]]) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
            far, idle = [], []
            for m in (good, bad):
                y = m.to(dtype)(source, target, ms, mt)
                far.append(max((y[b][mt[b]] - truth[b]).abs().max().item() for b in (0, 1)))
                assert (m(source, target[:, :3]) - m(source, target)[:, :3]).abs().max() < small
                m.zero_grad()
                y.pow(3).sum().backward()
                idle.append((m.memory_kv.weight.grad == 0).all(1).sum().item())
            print(layers, dtype, "right %.1e wrong %.2f" % tuple(far), "rows without a gradient", idle)
            assert far[0] < small and (far[1] > 0.1 if layers > 1 else far[1] < small)
            assert idle == [0, 8 * (layers - 1)]
