"""Shows in plain torch, for each pair, that the wrong file is wrong and the right one right."""
import importlib.util
import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
CHECKS = {}


def load(number, side):
    (path,) = HERE.glob(f"{number}_*_{side}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(f):
    CHECKS[f.__name__[1:]] = f
    return f


def close(a, b, tol=1e-5):
    return a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=tol)


@check
def _01(m):
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    g = torch.randn_like(x)
    good = True
    for dim in (-1, 1):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        (m.LeanSoftmax()(a, dim) * g).sum().backward()
        (b.softmax(dim) * g).sum().backward()
        good &= close(a.grad, b.grad)
    return good


@check
def _02(m):
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    ref = F.scaled_dot_product_attention(q, k, v, torch.ones(5, 40).tril(35).bool())
    plain = close(m.blockwise_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert plain
    return close(m.blockwise_attention(q, k, v, causal=True), ref)


@check
def _03(m):
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = m.forward(None, q, k, v, causal=True)
    s = 5 * torch.tanh(q @ k.mT / 2 / 5)
    ref = s.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf).softmax(-1) @ v
    assert close(out, ref)
    g = torch.randn_like(out)
    return all(
        close(a, b) for a, b in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(ref, (q, k, v), g))
    )


@check
def _04(m):
    x = torch.randn(2, 7, 8)
    a = m.LocalSelfAttention(8, 2)
    q, k, v = a.to_qkv(x).view(2, 7, 3, 2, 4).permute(2, 0, 3, 1, 4)
    band = torch.ones(7, 7).tril().triu(-2).bool()
    y = F.scaled_dot_product_attention(q, k, v, band)
    return close(a(x), a.to_out(y.transpose(1, 2).reshape(2, 7, 8)))


@check
def _05(m):
    a = m.CrossAttention(8, 2).eval()
    x, mem = torch.randn(2, 3, 8), torch.randn(2, 6, 8)
    mask = torch.arange(6)[None] < torch.tensor([4, 4])[:, None]
    return close(a(x, mem, mask), a(x, mem[:, :4]))


@check
def _06(m):
    r = m.subject.module
    x = torch.randn(1, 1, 6, 16, dtype=torch.float64)
    y = r(x, torch.arange(6))
    ref = x.clone()
    for p, i in itertools.product(range(6), range(4)):
        a = p * 10000 ** (-2 * i / 8)
        u, w = x[0, 0, p, i], x[0, 0, p, i + 4]
        ref[0, 0, p, i], ref[0, 0, p, i + 4] = u * math.cos(a) - w * math.sin(a), w * math.cos(a) + u * math.sin(a)
    return close(y, ref)


@check
def _07(m):
    def bucket(rel, n=16, far=40):  # as published (mesh-tensorflow), bidirectional
        ret, n = (n // 2 if rel > 0 else 0), n // 2
        rel = abs(rel)
        exact = n // 2
        if rel < exact:
            return ret + rel
        return ret + min(n - 1, exact + int(math.log(rel / exact) / math.log(far / exact) * (n - exact)))

    b = m.RelativePositionBias(2)
    w = b.relative_attention_bias.weight
    ref = torch.stack([torch.stack([w[bucket(j - i)] for j in range(30)]) for i in range(30)]).permute(2, 0, 1)
    return close(b(30, 30), ref)


@check
def _08(m):
    # published slopes of 6 heads: those of 4, then the 1st, 3rd of those of 8
    ref = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    return close(m.Alibi(6)(4, 4)[:, 3, 2], -ref)


@check
def _09(m):
    n = m.FusedLayerNorm(8).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(x)

    def same():
        a = torch.autograd.grad(n(x), (x, n.weight, n.bias), g)
        b = torch.autograd.grad(F.layer_norm(x, (8,), n.weight, n.bias, 1e-5), (x, n.weight, n.bias), g)
        return all(close(u, v) for u, v in zip(a, b))

    assert same()  # with gains of 1
    with torch.no_grad():
        n.weight.add_(torch.randn(8))
    return same()


@check
def _10(m):
    f = m.SwiGLU(8, 12)
    x = torch.randn(2, 3, 8)
    w1, w3 = f.w13.weight.chunk(2)
    return close(f(x), (F.silu(x @ w1.T) * (x @ w3.T)) @ f.w2.weight.T)


@check
def _11(m):
    f = m.SparseMoE(8, 12)
    x = torch.randn(2, 5, 8)
    ref = sum(m.router(f, x)[..., e, None] * f.experts[e](x) for e in range(4))
    return close(f(x), ref)


@check
def _12(m):
    d = m.DropPath(0.3).train()
    assert torch.equal(d.eval()(torch.ones(3, 2)), torch.ones(3, 2))
    return abs(d.train()(torch.ones(20000, 1)).mean().item() - 1) < 0.03


@check
def _13(m):
    e = m.Encoder(11, 8, 2, 3, 20, 0.0)
    one = sum(p.numel() for p in m.EncoderLayer(8, 2, 20, 0.0).parameters())
    return sum(p.numel() for p in e.parameters()) == 11 * 8 + 3 * one


@check
def _14(m):
    g = m.GPT(11, 8, 2, 2, 20).eval()
    t = torch.randint(11, (2, 9))
    return close(m.cached(g, [t[:, :4], t[:, 4:5], t[:, 5:]]), g(t)[0])


@check
def _15(m):
    g = m.MiniGPT(11, 8, 2, 1, 20, 32).eval()
    t = torch.randint(11, (4, 5))
    good = True
    for temperature in (0.5, 2.0):
        _, p = m.sample(g, t, 1, temperature=temperature, top_k=3)
        top = g(t)[:, -1].topk(3)
        ref = torch.zeros(4, 11).scatter(1, top.indices, (top.values / temperature).softmax(-1))
        good &= close(p[:, 0], ref)
    assert (m.sample(g, t, 1, top_k=3)[1] > 0).sum() == 12
    return good


@check
def _16(m):
    x, y = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    y[0, 3:] = -100
    ref = F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    return close(m.LabelSmoothedCrossEntropy()(x, y), ref)


@check
def _17(m):
    t = torch.randint(4, 1000, (200, 200))
    a, labels = m.MLMCollator(1000)(t, 0)
    c = labels != -100
    assert abs(c.float().mean() - 0.15) < 0.01 and torch.equal(labels[c], t[c]) and torch.equal(a[~c], t[~c])
    masked, kept = (a[c] == 3).float().mean(), (a[c] == t[c]).float().mean()
    return abs(masked - 0.8) < 0.02 and abs(kept - 0.1) < 0.02


@check
def _18(m):
    def line(s):
        return 3e-3 * s / 20 if s < 20 else 3e-3 + (6e-4 - 3e-3) * min(1, (s - 20) / 180)

    return all(abs(m.get_lr(s) - line(s)) < 1e-9 for s in range(300))


@check
def _19(m):
    g = m.GPT(11, 8, 2, 2, 20)
    ids = sorted(id(p) for group in g.optim_groups() for p in group["params"])
    return ids == sorted(id(p) for p in g.parameters())


@check
def _20(m):
    u = m.Unigram(m.COUNTS)

    def best(word):  # every segmentation
        if not word:
            return 0.0
        return max(
            u.logp.get(word[:i], u.unk_score if i == 1 else -math.inf) + best(word[i:])
            for i in range(1, len(word) + 1)
        )

    def score(pieces):
        return sum(u.logp.get(p, u.unk_score) for p in pieces)

    text = "the model attended to new tokens attends"
    return all(abs(score(u.segment(w)) - best(w)) < 1e-9 for w in u.words(text))


if __name__ == "__main__":
    for number, f in sorted(CHECKS.items()):
        torch.manual_seed(0)
        right = bool(f(load(number, "right")))
        torch.manual_seed(0)
        wrong = bool(f(load(number, "wrong")))
        print(number, "ok" if right and not wrong else f"BAD right={right} wrong={wrong}")
