"""Each wrong file is wrong and each right one right, in plain torch: `python prove.py`."""
import importlib.util, math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = SimpleNamespace(d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32,
                    num_classes=3, dropout=0.0, d_head=4)


def load(n, which):
    path = next(HERE.glob(f"{n:02d}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def make(mod, **sizes):
    torch.manual_seed(0)
    c = SimpleNamespace(**{**vars(C), **sizes})
    model = mod.subject.build(c) if mod.subject.build else mod.subject.module
    return model.double().eval()


def near(a, b):
    return bool(torch.allclose(a, b, atol=1e-9, rtol=1e-7))


def ids(B=3, T=9, V=11, seed=1):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def padding(mod, sides=("right",), pooled=False, V=11, **sizes):
    """A sequence alone gives what it gives padded, beside longer ones, whatever stands in the padding."""
    m, f = make(mod, **sizes), mod.subject.forward
    good = True
    for side in sides:
        for seed in range(4):
            for T in (1, 3, 6):
                short, pads = ids(1, T, V, seed), 9 - T
                a = f(m, short)
                for content in (ids(1, pads, V, seed + 50), ids(1, pads, V, seed + 80)):
                    row = torch.cat([short, content] if side == "right" else [content, short], 1)
                    mask = torch.zeros(3, 9, dtype=torch.bool)
                    mask[:2] = True
                    mask[2, :T] = True
                    if side == "left":
                        mask[2] = mask[2].flip(0)
                    b = f(m, torch.cat([ids(2, 9, V, seed + 9), row]), mask)[2:]
                    if not pooled:
                        b = b[:, :T] if side == "right" else b[:, pads:]
                    good &= near(a, b)
    return good


def prefix(mod, **sizes):
    m, f, x = make(mod, **sizes), mod.subject.forward, ids()
    whole = f(m, x)
    return all(near(f(m, x[:, :t]), whole[:, :t]) for t in range(1, 9))


def batch(mod, **kw):
    m, f, x = make(mod), mod.subject.forward, ids(4, 9)
    return near(f(m, x), torch.cat([f(m, x[i:i + 1]) for i in range(4)]))


def cached(mod, reorder=None, **sizes):
    m, s, x = make(mod, **sizes), mod.subject, ids()
    good = True
    for cuts in ([1] * 9, [2, 1, 1, 5], [4, 5], [3, 1, 2, 1, 2]):
        chunks = list(x.split(cuts, 1))
        if reorder is None:
            good &= near(s.cache(m, chunks), s.forward(m, x))
        else:
            order = torch.tensor(reorder)
            got = s.cache(m, chunks, reorder=order)
            first = x[:, :cuts[0]]
            whole = s.forward(m, torch.cat([first[order], x[:, cuts[0]:]], 1))
            good &= near(got[:, :cuts[0]], s.forward(m, first)) and near(got[:, cuts[0]:], whole[:, cuts[0]:])
    return good


def p01(mod): return padding(mod, ("right", "left")) and batch(mod)
def p02(mod): return prefix(mod) and cached(mod)
def p03(mod): return padding(mod, pooled=True) and batch(mod)
def p04(mod):
    m, x = make(mod), ids()
    return padding(mod) and near(mod.subject.forward(m, x).norm(dim=-1), torch.ones(3, 9).double())
def p05(mod): return prefix(mod) and batch(mod)


def p06(mod):
    m, x = make(mod), torch.randn(2, 7, 8).double()
    a = m.layers[0].rga
    q, k, v = (g(x).view(2, 7, 2, 4).transpose(1, 2) for g in (a.query, a.key, a.value))
    ref = torch.empty(2, 2, 7, 4).double()
    for t in range(7):  # by definition: q_t . (k_s + e[t - s]) / sqrt(d)
        e = torch.stack([a.Er[31 - (t - s)] for s in range(t + 1)])
        w = (torch.einsum("bhd,bhsd->bhs", q[:, :, t], k[:, :, :t + 1] + e) / 2).softmax(-1)
        ref[:, :, t] = torch.einsum("bhs,bhsd->bhd", w, v[:, :, :t + 1])
    return near(a(x), a.out(ref.transpose(1, 2).reshape(2, 7, 8))) and prefix(mod)


def p07(mod): return padding(mod, ("right", "left"), V=4) and batch(mod)
def p08(mod): return (prefix(mod) and cached(mod) and cached(mod, [2, 0, 0])
                      and cached(mod, [1, 2, 1], num_heads=4, num_key_value_heads=2))


def p09(mod):
    m, f = make(mod), mod.subject.forward
    good = True
    with torch.no_grad():
        y = ids(2, 5, seed=7)
        for seed in range(3):
            x = ids(2, 6, seed=seed)
            fresh = make(mod)
            good &= near(f(m, x, y), f(fresh, x, y)) and near(f(m, x, y[:, :3]), f(make(mod), x, y)[:, :3])
        mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
        good &= near(f(m, x, y, mask)[1:], f(m, x[1:, :4], y[1:]))
    return good


def p10(mod): return padding(mod, pooled=True) and padding(mod, pooled=True, num_heads=4) and batch(mod)
def p11(mod): return batch(mod) and padding(mod, pooled=True, V=3)


def p12(mod):
    m, x, y = make(mod), ids(), ids(seed=5).clone()
    y[0, 2:] = -100
    y[2, 5] = -100
    ref = F.cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=-100)
    return near(mod.subject.loss(m, x, y), ref) and prefix(mod) and mod.subject.loss(m, x, y * 0 - 100) == 0


def p13(mod):
    m = make(mod)
    good = padding(mod) and batch(mod)
    for b in m.blocks:  # tokens t and s see one another where floor((t - shift) / 4) is the same
        for T in (1, 3, 4, 5, 8, 11):
            x = torch.randn(2, T, 8).double()
            q, k, v = b.qkv(b.norm1(x)).view(2, T, 3, 2, 4).permute(2, 0, 3, 1, 4)
            g = torch.div(torch.arange(T) - b.shift, 4, rounding_mode="floor")
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=g[:, None] == g[None])
            h = x + b.proj(y.transpose(1, 2).reshape(2, T, 8))
            h = h + b.fc2(F.gelu(b.fc1(b.norm2(h))))
            good &= near(b(x, torch.ones(2, T, dtype=torch.bool)), h)
    return good


def p14(mod): return padding(mod, pooled=True) and batch(mod)


def p15(mod):
    m, f, x = make(mod), mod.subject.forward, ids()
    good = padding(mod) and near(f(m, x), f(m.train(), x))  # dropout 0: training changes nothing
    m = make(mod, dropout=0.1).train()
    kept = (m.layers[0].drop(torch.ones(100000).double()) != 0).double().mean()
    return good and abs(float(kept) - 0.9) < 0.01


def p16(mod):
    m, x = make(mod), ids()
    mod.subject.forward(m, x).pow(2).sum().backward()
    return padding(mod, pooled=True) and all(p.grad is not None and p.grad.abs().max() > 0 for p in m.parameters())


def p17(mod): return prefix(mod) and batch(mod)


def p18(mod):
    m, f = make(mod), mod.subject.forward
    x = ids(1, 12, 16)
    good = padding(mod, V=16)
    pos = m.positions(12, "cpu")
    ref = torch.stack([m.row.weight[r] + m.col.weight[c] for r in range(3) for c in range(4)])
    good &= near(pos, ref) and float(torch.pdist(pos.detach()).min()) > 1e-3
    for a in range(12):
        for b in range(a):
            p = torch.arange(12); p[a], p[b] = b, a
            good &= x[0, a] == x[0, b] or not near(f(m, x[:, p])[:, p], f(m, x))
    return bool(good)


def p19(mod):
    m = make(mod).float(); x = ids()
    k = torch.arange(9).double()[:, None] / 10000 ** (torch.arange(4).double() * 2 / 8)
    pe = torch.stack([k.sin(), k.cos()], -1).flatten(1)
    ok = torch.allclose(m.embed(x).double(), m.lut.weight.double()[x] * math.sqrt(8) + pe, atol=1e-5)
    m, f, y = make(mod), mod.subject.forward, ids(3, 7, seed=4)
    mask = torch.ones(3, 9, dtype=torch.bool); mask[1, 5:] = False
    whole = f(m, x, y, mask)
    ok &= near(whole[1:2], f(m, x[1:2, :5], y[1:2])) and near(whole[:, :4], f(m, x, y[:, :4], mask))
    return ok and m.generator.weight is m.lut.weight


def p20(mod):
    m, s = make(mod), mod.subject
    x = torch.randn(2, 5, 8).double()
    moe, w = m.blocks[0].moe, s.router(m, x)
    ref = sum(w[..., e, None] * moe.experts[e](x) for e in range(4))
    return near(w.sum(-1), torch.ones(2, 5).double()) and bool(((w > 0).sum(-1) == 2).all()) and near(moe(x), ref) and prefix(mod)


if __name__ == "__main__":
    bad = 0
    for n in range(1, 21):
        right, wrong = load(n, "right"), load(n, "wrong")
        assert isinstance(wrong.WHAT, str) and right.subject.declares == wrong.subject.declares
        proof = globals()[f"p{n:02d}"]
        r, w = bool(proof(right)), bool(proof(wrong))
        bad += not r or w
        print(f"{n:02d}", "ok" if r and not w else f"BAD right={r} wrong={w}")
    raise SystemExit(bad)
