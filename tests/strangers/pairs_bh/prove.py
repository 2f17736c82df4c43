"""For each pair, in plain torch: the right one agrees with an independent reference or its defining relation, the wrong does not."""
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
HERE = Path(__file__).parent
C = SimpleNamespace(
    d_model=16, num_heads=2, num_key_value_heads=2, num_layers=3, d_ff=20, vocab_size=11, max_len=16, num_classes=3,
    dropout=0.0, d_head=8,
)


def load(path):
    spec = importlib.util.spec_from_file_location("m_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def built(m, **more):
    torch.manual_seed(0)
    return m.subject.build(SimpleNamespace(**{**vars(C), **more}))


def toks(b, t, seed=1):
    return torch.randint(0, 11, (b, t), generator=torch.Generator().manual_seed(seed))


def close(a, b, tol=1e-8):
    return a.shape == b.shape and bool((a - b).abs().max() < tol)


def grads(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def p01(m):  # gradients with and without checkpointing
    model, x = built(m), toks(2, 6)
    a = grads(model, model(x).square().sum())
    model.grad_checkpointing = False
    b = grads(model, model(x).square().sum())
    return all(close(i, j) for i, j in zip(a, b))


def p02(m):
    model = built(m)
    return all(
        torch.equal(model.generate(x, 8, True), model.generate(x, 8, False)) for x in (toks(3, 3, s) for s in range(6))
    )


def cache_vs_full(m, x, cuts):
    model = built(m)
    return close(m.subject.cache(model, list(x.split(cuts, dim=1))), m.subject.forward(model, x))


def p03(m):
    return cache_vs_full(m, torch.tensor([[1, 2, 3, 4], [5, 2, 3, 6]]), [2, 1, 1])


def p04(m):
    return cache_vs_full(m, toks(2, 6), [3, 1, 2])


def p05(m):
    model, x = built(m), toks(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    a = grads(model, model(x, mask).pow(3).sum())
    y1 = y2 = model.tokens(x) + model.positions.weight[:5]
    for f, g in zip(model.f, model.g):  # plain autograd
        y1 = y1 + f(y2, mask)
        y2 = y2 + g(y1)
    b = grads(model, model.out(model.norm(torch.cat([y1, y2], -1))).pow(3).sum())
    return all(close(i, j) for i, j in zip(a, b))


def p06(m):  # a batch is its rows one by one
    model, x = built(m), toks(3, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    out = model(x, mask)
    return all(close(out[b][mask[b]], model(x[b][mask[b]][None])[0]) for b in range(3))


def p07(m):
    model, s, t = built(m), toks(2, 5), toks(2, 6, 3)
    return close(m.subject.cache(model, s, [t[:, :2], t[:, 2:3], t[:, 3:]]), model(s, t))


def p08(m):  # no mask and a mask of ones are the same; padding by hand too
    model, x = built(m).eval(), toks(2, 6)
    ones = torch.ones(2, 6).bool()
    padded = model(F.pad(x, (0, 3), value=7), F.pad(ones, (0, 3), value=False))
    return close(model(x), model(x, ones)) and close(model(x), padded)


def p09(m):
    model, x = built(m), torch.randn(2, 5, 16)
    return close(model.train()(x), model.eval()(x))


def p10(m):
    rope, x, ok = built(m), torch.randn(2, 2, 5, 8), True
    for start in (0, 7, 3):
        p = torch.arange(start, start + 5)
        z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
            torch.ones(5, 4), p[:, None] * 10000.0 ** (-torch.arange(4) / 4.0)
        )
        ok &= close(rope(x, p), torch.cat([z.real, z.imag], -1))
    return ok


def p11(m):
    model, x, mem = built(m), torch.randn(2, 3, 16), torch.randn(2, 11, 16)
    mask = torch.rand(2, 11) < 0.7
    mask[:, 0] = True
    q = model.to_q(x).view(2, 3, 2, 8).transpose(1, 2)
    k, v = (a[:, None].expand(2, 2, 11, 8) for a in model.to_kv(mem).chunk(2, -1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    return close(model(x, mem, mask), model.to_out(y.transpose(1, 2).flatten(2)))


def p12(m):
    q, k, v = torch.randn(2, 4, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 6)
    for a in (q, k, v):
        a.requires_grad_()
    out = m.attend(None, q, k, v, causal=True)
    allowed = torch.ones(3, 5).bool().tril(2)
    ref = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=allowed
    )
    a, b = (torch.autograd.grad(o.pow(3).sum(), (q, k, v)) for o in (out, ref))
    return close(out, ref) and all(close(i, j) for i, j in zip(a, b))


def p13(m):
    model, x = built(m).eval(), torch.randn(2, 5, 16)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    with torch.no_grad():
        fused = model(x, mask)
    return close(fused, model(x, mask).detach())


def p14(m):
    ok = True
    for d in (6, 8, 12, 16):
        model, x = built(m, d_model=d), torch.randn(2, 3, d) * 3 + torch.arange(d)
        ok &= close(model(x), F.layer_norm(x, (d,)))
    return ok


def mixture(x, dense, expert):
    return sum(dense[..., e : e + 1] * expert(x, e) for e in range(dense.shape[-1]))


def top2(logits):
    w, i = logits.softmax(-1).topk(2, -1)
    return torch.zeros_like(logits).scatter(-1, i, w / w.sum(-1, keepdim=True))


def p15(m):
    model, x = built(m), torch.randn(3, 5, 16)
    dense = top2(model.gate(x))
    ref = mixture(x, dense, lambda x, e: (F.silu(x @ model.w1[e].T) * (x @ model.w3[e].T)) @ model.w2[e].T)
    return close(model(x), ref) and close(m.subject.router(model, x), dense)


def p16(m):
    model, x = built(m), torch.randn(3, 5, 16)
    dense = top2(model.wg(x))
    ref = mixture(x, dense, lambda x, e: torch.relu(x @ model.up[e]) @ model.down[e])
    return close(model(x), ref) and close(m.subject.router(model, x), dense)


def p17(m):
    logits, labels = torch.randn(4, 6, 11), toks(4, 6)
    labels[1, 3:] = -100
    labels[2, :2] = -100
    whole = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    pairs = [(logits[:1], labels[:1]), (logits[1:], labels[1:])]
    return close(m.subject.accumulate(None, pairs), whole) and close(m.subject.forward(None, logits, labels), whole)


def p18(m):
    ok = True
    for v in (8, 11):
        logits, labels = torch.randn(3, 5, v), toks(3, 5) % v
        labels[0, :2] = -100
        ref = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        ok &= close(built(m)(logits, labels), ref)
    return ok


def p19(m):
    c = m.MLMCollator(1000)
    x = torch.randint(4, 1000, (50, 400), generator=torch.Generator().manual_seed(5))
    a, y = c(x, 3)
    b, z = c(x, 3)
    chosen = y != -100
    hidden = (a[chosen] == 3).double().mean()
    kept = (a[chosen] == x[chosen]).double().mean()
    same = torch.equal(a, b) and torch.equal(y, z) and torch.equal(y[chosen], x[chosen])
    rest = torch.equal(a[~chosen], x[~chosen]) and abs(chosen.double().mean() - 0.15) < 0.01
    return bool(same and rest and abs(hidden - 0.8) < 0.03 and abs(kept - 0.1) < 0.03)


def p20(m):
    model = built(m)
    ids = sorted(id(p) for g in m.subject.forward(model) for p in g["params"])
    return ids == sorted(id(p) for p in model.parameters())


if __name__ == "__main__":
    for n in range(1, 21):
        right, wrong = (next(HERE.glob(f"{n:02}_*_{side}.py")) for side in ("right", "wrong"))
        verdicts = []
        for path in (right, wrong):
            torch.manual_seed(7)
            verdicts.append(globals()[f"p{n:02}"](load(path)))
        print(f"{n:02}", "ok" if verdicts == [True, False] else f"BAD {verdicts}", flush=True)
