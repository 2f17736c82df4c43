"""A reversible decoder (Reformer's residual streams) with a backward of its own: nothing is kept of a layer but its output, inputs
are computed back in the backward pass. ALiBi; the two streams start alike and are averaged at the end.

Why it is right: y1 = x1 + f(x2), y2 = x2 + g(y1) is undone by x2 = y2 - g(y1), x1 = y1 - f(x2), up to rounding, and the gradients are
those of autograd. Below: output against loops in float64, gradients against plain autograd through the same formula
and against finite differences, causal, shift invariant, padding on both sides."""

import contextlib

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


def pure(module, params, *inputs):
    return torch.func.functional_call(module, dict(zip((n for n, _ in module.named_parameters()), params)), inputs)


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x1, x2, bias, f, g, *params):
        count = len(list(f.parameters()))
        y1 = x1 + pure(f, params[:count], x2, bias)
        y2 = x2 + pure(g, params[count:], y1)
        ctx.save_for_backward(y1, y2, bias, *params)
        ctx.modules, ctx.count, kind = (f, g), count, x1.device.type
        ctx.cast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx, d1, d2):
        y1, y2, bias, *params = ctx.saved_tensors
        f, g = ctx.modules
        pf, pg = ([p.detach().requires_grad_() for p in ps] for ps in (params[: ctx.count], params[ctx.count :]))
        cast = torch.autocast(ctx.cast[0], ctx.cast[1]) if ctx.cast else contextlib.nullcontext()
        with torch.enable_grad(), cast:
            y1 = y1.detach().requires_grad_()
            branch = pure(g, pg, y1)
            x2 = (y2 - branch).detach().requires_grad_()
            back = torch.autograd.grad(branch, [y1, *pg], d2.to(branch.dtype))
            d1, dg = d1 + back[0], back[1:]
            branch = pure(f, pf, x2, bias)
            back = torch.autograd.grad(branch, [x2, *pf], d1.to(branch.dtype))
        return d1, d2 + back[0], None, None, None, *back[1:], *dg


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.norm, self.qkv, self.out = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, x, bias):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        seen = bias > -torch.inf
        scores = torch.where(seen, scores + bias.to(scores.dtype), torch.finfo(scores.dtype).min)
        return self.out(((scores.softmax(-1) * seen) @ v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x):
        return self.down(F.relu(self.up(self.norm(x))))


class Reformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.f = nn.ModuleList(Attention(c) for _ in range(c.num_layers))
        self.g = nn.ModuleList(Feed(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def bias(self, tokens, mask):
        heads, at = self.f[0].heads, torch.arange(tokens.shape[1], device=tokens.device)
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64, device=tokens.device) / heads)
        apart = at[:, None] - at[None]
        bias = (-slopes[:, None, None] * apart).masked_fill(apart < 0, -torch.inf)[None]
        return bias if mask is None else bias.masked_fill(~mask.bool()[:, None, None], -torch.inf)

    def forward(self, tokens, attention_mask=None, plain=False):
        bias = self.bias(tokens, attention_mask)
        x1 = x2 = self.embed(tokens)
        for f, g in zip(self.f, self.g):
            if plain:
                x1 = x1 + f(x2, bias)
                x2 = x2 + g(x1)
            else:
                x1, x2 = Reversible.apply(x1, x2, bias, f, g, *f.parameters(), *g.parameters())
        return self.head(self.norm((x1 + x2) / 2))


def make(**declares):
    return Subject(
        kind="decoder", name="reversible", build=Reformer, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"num_heads": [1, 2, 4], "d_model": [8, 16]},
    )  # fmt: skip


declared = make(
    causal=True, once_differentiable=True, positions="alibi", norm="layer", norm_placement="pre", final_norm=True,
    activation="relu", bias=True, output_bias=True, tied=False, attention_scale="1/sqrt(d_head)", padding_side="both",
    structure="other", embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=8, num_heads=2, num_layers=3)
    model = Reformer(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.4)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:], mask[1, :3] = False, False

    def slow(row):
        def lin(x, n):
            return x @ w[n + ".weight"].T + w[n + ".bias"]

        def norm(x, n):
            return F.layer_norm(x, (8,), w[n + ".weight"], w[n + ".bias"])

        a = b = w["embed.weight"][row]
        for l in range(3):
            q, k, v = lin(norm(b, f"f.{l}.norm"), f"f.{l}.qkv").chunk(3, 1)
            out = torch.zeros_like(a)
            for h, slope in enumerate((1 / 16, 1 / 256)):
                r = slice(4 * h, 4 * h + 4)
                for t in range(len(row)):
                    e = torch.stack([q[t, r] @ k[s, r] / 2 - slope * (t - s) for s in range(t + 1)]).softmax(0)
                    out[t, r] = e @ v[: t + 1, r]
            a = a + lin(out, f"f.{l}.out")
            b = b + lin(lin(norm(a, f"g.{l}.norm"), f"g.{l}.up").relu(), f"g.{l}.down")
        return lin(norm((a + b) / 2, "norm"), "head")

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        m = model.to(dtype)
        y = m(tokens, mask)
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(tokens[:, :4]) - m(tokens)[:, :4]).abs().max().item()
        grads = [
            torch.autograd.grad(m(tokens, mask, plain)[mask].pow(2).mean(), list(m.parameters())) for plain in (False, True)
        ]
        gap = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(*grads))
        print(dtype, f"definition {far:.1e} causality {causal:.1e} gradients {gap:.1e}")
        assert max(far, causal) < small and gap < small * 10
    m, step = model.double(), 1e-6
    p = m.f[1].qkv.weight
    exact = torch.autograd.grad(m(tokens, mask)[mask].pow(2).mean(), p)[0]
    with torch.no_grad():
        for i, j in ((0, 0), (5, 3), (20, 7)):
            p[i, j] += step
            up = m(tokens, mask)[mask].pow(2).mean()
            p[i, j] -= 2 * step
            slope = (up - m(tokens, mask)[mask].pow(2).mean()) / (2 * step)
            p[i, j] += step
            assert (slope - exact[i, j]).abs() < 1e-6 * (1 + slope.abs()), (slope, exact[i, j])
    print("finite differences agree")
