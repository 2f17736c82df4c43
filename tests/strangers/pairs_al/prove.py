"""Shows, in plain torch, that each wrong file is wrong and each right one right."""
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = SimpleNamespace(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=40, max_len=32,
                    num_classes=3, dropout=0.0, d_head=4)


def load(n, which):
    path = next(HERE.glob(f"{n:02d}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(f"p{n}_{which}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(m, **sizes):
    torch.manual_seed(0)
    made = m.subject.build(SimpleNamespace(**{**vars(C), **sizes}))
    if isinstance(made, torch.nn.Module):
        with torch.no_grad():
            for p in made.parameters():
                if p.dim() > 1:
                    p.normal_(0, p.shape[-1] ** -0.5 if p.shape[0] != 40 else 1)
        made.eval()
    return made


def ids(b, t, seed=1):
    return torch.randint(5, 40, (b, t), generator=torch.Generator().manual_seed(seed))


def near(a, b):
    return torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def p01(m):
    g, x, r = model(m), ids(3, 7), torch.tensor([2, 0, 0])
    got = m.subject.cache(g, [x[:, :4], x[:, 4:5], x[:, 5:]], reorder=r)
    plain = m.subject.cache(g, [x[:, :4], x[:, 4:]])
    assert near(plain, g(x))
    return near(got[:, 4:], g(torch.cat((x[r, :4], x[:, 4:]), 1))[:, 4:])


def p02(m):
    g, x = model(m), ids(2, 7)
    assert near(m.subject.cache(g, [x[:, i:i + 1] for i in range(7)]), g(x)[0])
    return near(m.subject.cache(g, [x[:, :3], x[:, 3:5], x[:, 5:]]), g(x)[0])


def p03(m):
    g, s, t = model(m), ids(2, 6), ids(2, 5, 2)
    mask = torch.arange(6)[None].expand(2, 6) < 4
    return near(m.subject.forward(g, s, t, source_mask=mask), m.subject.forward(g, s[:, :4], t))


def p04(m):
    g, x = model(m), ids(2, 6)
    return near(g(x, torch.arange(6)[None].expand(2, 6) < 4), g(x[:, :4]))


def p05(m):
    g, x = model(m), torch.randn(2, 5, 16)
    w = g.route(x)
    assert (w > 0).sum(-1).eq(2).all() and near(w.sum(-1), torch.ones(2, 5))
    return near(g(x), sum(w[..., e, None] * f(x) for e, f in enumerate(g.experts)))


def p06(m):
    g = model(m)
    held = [id(p) for group in m.param_groups(g) for p in group["params"]]
    return sorted(held) == sorted(id(p) for p in g.parameters())


def p07(m):
    s = model(m)
    want = lambda t: 6e-4 * t / 20 if t < 20 else 6e-5 + 5.4e-4 * (1 + math.cos(math.pi * (t - 20) / 180)) / 2
    return all(abs(s.get_lr(t) - want(t)) < 1e-9 for t in range(201))


def p08(m):
    c, x = model(m), torch.randn(3, 4, 6, 40)
    y = torch.randint(0, 40, (3, 4, 6))
    y[0, :, 1:] = -100
    whole = F.cross_entropy(x.reshape(-1, 40), y.reshape(-1))
    return near(m.accumulate(c, zip(x, y)), whole) and near(c(x, y), whole)


def p09(m):
    x = ids(200, 100)
    a, b = model(m)(x, 3)
    on = b != -100
    assert (b[on] == x[on]).all() and (a[~on] == x[~on]).all() and abs(on.float().mean() - 0.15) < 0.01
    return abs((a[on] == 4).float().mean() - 0.8) < 0.03 and abs((a[on] == x[on]).float().mean() - 0.1) < 0.03


def p10(m):
    g, x = model(m), ids(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3], mask[1, :1] = False, False
    out = g(x, mask)
    return near(out[0, 3:], g(x[:1, 3:])[0]) and near(out[1, 1:], g(x[1:, 1:])[0])


def p11(m):
    g, ok = model(m), True
    for seed in range(8):
        x = want = ids(3, 5, seed)
        for _ in range(8):
            want = torch.cat((want, g(want)[:, -1:].argmax(-1)), 1)
        assert torch.equal(g.generate(x, 8, False), want)
        ok &= torch.equal(g.generate(x, 8, True), want)
    return ok


def p12(m):
    g, x = model(m), ids(4, 5)
    out, dist = g.sample(x, 3, top_k=4)
    for s in range(3):
        logits = g(out[:, : 5 + s])[:, -1]
        top = logits.topk(4).indices
        want = torch.zeros_like(logits).scatter(1, top, logits.gather(1, top).softmax(-1))
        if not near(dist[:, s], want):
            return False
    return True


def p13(m):
    g = m.subject.build(C)
    return g.head.weight is g.wte.weight


def p14(m):
    a = model(m).layers[0][1]
    x = torch.randn(2, 6, 16)
    q, (k, v) = a.to_q(x), a.to_kv(x).chunk(2, -1)
    out = []
    for h in range(4):
        c = slice(4 * h, 4 * h + 4)
        s = q[..., c] @ k[..., c].mT / 2
        for i in range(6):
            for j in range(6):
                s[:, i, j] += -(2 ** (-2 * (h + 1))) * (i - j) if j <= i else -math.inf
        out.append(s.softmax(-1) @ v[..., c])
    return near(a(x), a.to_out(torch.cat(out, -1)))


def p15(m):
    g, x = model(m), ids(2, 11)
    full = g(x)
    one = model(m, num_layers=1)
    y = x.clone()
    y[:, 2] = (y[:, 2] + 1) % 40
    moved = (one(x) - one(y)).abs().amax((0, 2)) > 1e-5
    assert moved.tolist() == [2 <= t < 6 for t in range(11)]
    return near(m.subject.cache(g, [x[:, i:i + 1] for i in range(11)]), full) and near(
        m.subject.cache(g, [x[:, :5], x[:, 5:7], x[:, 7:]]), full)


def p16(m):
    d = m.DropPath(0.4).train()
    torch.manual_seed(0)
    return abs(d(torch.ones(20000, 1, 1)).mean() - 1) < 0.03


def p17(m):
    g, x = model(m), ids(2, 8)
    base = g(x)
    for s in range(8):
        y = x.clone()
        y[:, s] = (y[:, s] + 3) % 40
        moved = ((g(y) - base).abs().amax((0, 2)) > 1e-5).tolist()
        if moved != [s <= t or s < 3 for t in range(8)]:
            return False
    return True


def p18(m):
    g, t = model(m), ids(2, 5, 9)
    for seed in (1, 2):
        s = ids(2, 6, seed)
        if not near(m.subject.cache(g, s, [t[:, :2], t[:, 2:]]), g(s, t)):
            return False
    return True


def p19(m):
    g, x = model(m), ids(3, 6)
    return near(g(x, x)["loss"], F.cross_entropy(g(x)["logits"][:, :-1].reshape(-1, 40), x[:, 1:].reshape(-1)))


def p20(m):
    g = model(m)
    found = [id(p) for l in g.layer for n in (l.attention_norm, l.output_norm) for p in n.parameters()]
    return len(set(found)) == 8


if __name__ == "__main__":
    bad = 0
    for n in range(1, 21):
        prove = globals()[f"p{n:02d}"]
        with torch.no_grad():
            right, wrong = bool(prove(load(n, "right"))), bool(prove(load(n, "wrong")))
        bad += not (right and not wrong)
        print(f"{n:02d} ok" if right and not wrong else f"{n:02d} BAD right={right} wrong={wrong}")
    raise SystemExit(bad)
