"""Each pair in plain torch: the wrong one is wrong, the right one right."""
import importlib.util
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = DrawnConfig(d_model=8, num_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fresh(module, c=C, seed=0):
    torch.manual_seed(seed)
    s = module.subject
    return s, (s.build(c).double() if isinstance(built := s.build(c), torch.nn.Module) else built) if s.build else None


def close(a, b, tol=1e-9):
    return a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=tol)


def p01(m):
    s, model = fresh(m)
    return all(
        close(s.forward(model, x, d), x.softmax(d))
        for x in (torch.randn(3, 2, 7).double(), torch.randn(5, 4).double()) for d in (-1, 0)
    )


def reference(q, k, v, mask=None, causal=False):
    r = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            sc = q[b, h] @ k[b, h // r].T / math.sqrt(q.shape[-1])
            for t in range(q.shape[2]):
                see = [j for j in range(k.shape[2]) if (mask is None or bool(mask[b, 0, t, j])) and (not causal or j <= t + k.shape[2] - q.shape[2])]
                rows.append(sc[t, see].softmax(0) @ v[b, h // r][see] if see else torch.zeros(v.shape[-1], dtype=q.dtype))
    return torch.stack(rows).view_as(out)


def qkv(E, seed=0):
    g = torch.Generator().manual_seed(seed)
    r = lambda *n: torch.randn(*n, generator=g, dtype=torch.float64).requires_grad_()
    return r(2, 4, 5, 6), r(2, 2, 7, 6), r(2, 2, 7, E), torch.rand(2, 1, 5, 7, generator=g) < 0.6


def p02(m):
    ok = True
    for E in (6, 10):
        q, k, v, mask = qkv(E)
        for a in ((None, False), (mask, False), (None, True), (mask, True)):
            ok &= close(m.subject.forward(None, q, k, v, *a), reference(q, k, v, *a))
    return ok


def p03(m):
    q, k, v, mask = qkv(6)
    ok = True
    for a in ((None, False), (None, True), (mask, False), (mask, True)):
        r = torch.randn(2, 4, 5, 6, dtype=torch.float64)
        y, z = m.subject.forward(None, q, k, v, *a), reference(q, k, v, *a)
        assert close(y, z)  # the forward is right in both
        got, want = torch.autograd.grad((y * r).sum(), (q, k, v)), torch.autograd.grad((z * r).sum(), (q, k, v))
        ok &= all(close(x, w) for x, w in zip(got, want))
    return ok


def p04(m):
    s, model = fresh(m)
    x = torch.randn(2, 5, 8).double()
    q, k, v = (getattr(model, n)(x).view(2, 5, 2, 4).transpose(1, 2) for n in "qkv")
    want = model.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8))
    return close(s.forward(model, x), want)


def p05(m):
    s, model = fresh(m)
    x, memory = torch.randn(1, 3, 8).double(), torch.randn(1, 6, 8).double()
    ok = True
    for mask in ([1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0]):
        mask = torch.tensor([mask]).bool()
        ok &= close(s.forward(model, x, memory, mask), s.forward(model, x, memory[:, mask[0]]))
    return ok


def p06(m):
    s, model = fresh(m)
    x = torch.randn(1, 1, 5, 4).double()
    ok = True
    for p in (torch.arange(5), torch.arange(5) + 7, torch.tensor([0, 3, 4, 9, 30])):
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        freq = torch.tensor([1.0, 0.01], dtype=torch.float64)
        want = torch.view_as_real(z * torch.exp(1j * p[:, None] * freq)).flatten(-2)
        ok &= close(s.forward(model, x, p), want)
    return ok


def p07(m):
    s, model = fresh(m)
    bias, table = s.forward(model, 4, 6), model.relative_attention_bias.weight
    return all(
        close(bias[h, i, j], table[int(m.bucket_of(torch.tensor(j - i))), h]) for h in range(2) for i in range(4) for j in range(6)
    )


def p08(m):
    s, model = fresh(m)
    a, b = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8).double()
    with torch.no_grad():
        ya = s.forward(model, a)
        yb = s.forward(model, b)
    f = lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert close(yb, f(b))
    return close(ya, f(a))


def p09(m):
    s, model = fresh(m)
    x, a, b = torch.randn(2, 3, 8).double(), model.dense_h_to_4h, model.dense_4h_to_h
    return close(s.forward(model, x), F.gelu(x @ a.weight.T + a.bias) @ b.weight.T + b.bias)


def p10(m):
    _, model = fresh(m, DrawnConfig(d_model=32, num_heads=2, num_layers=2, vocab_size=200, max_len=64))
    return all(abs(w.mean()) < 0.003 and abs(w.std() - 0.02) < 0.003 for w in (model.wte.weight, model.wpe.weight, model.lm_head.weight))


def p11(m):
    s, model = fresh(m)
    x = torch.randn(2, 4, 8).double().requires_grad_()
    r, d = torch.randn(2, 4, 8).double(), torch.randn(2, 4, 8).double()
    f = lambda t: (s.forward(model, t) * r).sum()
    got = (torch.autograd.grad(f(x), x)[0] * d).sum()
    want = (f(x + 1e-5 * d) - f(x - 1e-5 * d)) / 2e-5
    return close(got, want, 1e-6)


def p12(m):
    s, model = fresh(m)
    tokens = torch.randint(11, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    return close(s.forward(model, tokens, mask)[1, :3], s.forward(model, tokens[1:, :3])[0])


def p13(m):
    s, model = fresh(m)
    ok = True
    for k in (1, 3, 10):
        _, p = s.sampling(model, torch.randint(11, (3, 4)), 2, top_k=k)
        ok &= bool(((p > 0).sum(-1) == k).all())
    return ok


def p14(m):
    s, model = fresh(m)
    tokens, after, order = torch.randint(11, (3, 4)), torch.randint(11, (3, 3)), torch.tensor([2, 0, 0])
    assert close(s.cache(model, [tokens, after]), s.forward(model, torch.cat((tokens, after), 1)))
    got = s.cache(model, [tokens, after[:, :1], after[:, 1:]], reorder=order)[:, 4:]
    return close(got, s.forward(model, torch.cat((tokens[order], after), 1))[:, 4:])


def p15(m):
    s, model = fresh(m)
    source, target = torch.randint(11, (2, 4)), torch.randint(11, (2, 5))
    padded = torch.cat((source, torch.zeros(2, 3, dtype=torch.long)), 1)
    mask = (torch.arange(7) < 4).expand(2, 7)
    seen = []
    model.decoder[0].register_forward_pre_hook(lambda mod, args: seen.append(args[0]))
    same = close(s.forward(model, source, target), s.forward(model, padded, target, mask))
    p, j = torch.arange(5.0).double()[:, None], torch.arange(4).double()
    a = p / 10000 ** (2 * j / 8)
    want = model.embedding(target) * 8**0.5 + torch.stack((a.sin(), a.cos()), -1).flatten(-2)
    return same and close(seen[0], want)


def p16(m):
    s, model = fresh(m)
    tokens, labels = torch.randint(11, (4, 5)), torch.tensor([0, 1, 2, 1])
    return close(s.loss(model, tokens, labels), -s.forward(model, tokens).log_softmax(-1)[range(4), labels].mean())


def p17(m):
    s, model = fresh(m)
    logits, labels = torch.randn(2, 5, 11).double(), torch.tensor([[0, 3, -100, 1, 0], [2, 0, 5, -100, 10]])
    return close(s.forward(model, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def p18(m):
    s, model = fresh(m)
    data = torch.randint(4, 11, (8, 32))
    kept = data.clone()
    ok = True
    for seed in range(3):
        _, labels = s.forward(model, data, seed)
        counted = labels != -100
        ok &= bool((labels[counted] == kept[counted]).all()) and torch.equal(data, kept)
    return ok


def p19(m):
    s, model = fresh(m)
    groups = s.forward(model)
    before = model.wte.weight.detach().clone()
    import warnings
    warnings.simplefilter("ignore")
    optimizer = torch.optim.SGD([{**g, "weight_decay": 0.0} for g in groups], lr=1.0)
    (model(torch.randint(11, (2, 4)))).square().mean().backward()
    gradient = model.wte.weight.grad.clone()
    optimizer.step()
    ids = [id(p) for g in groups for p in g["params"]]
    assert set(ids) == {id(p) for p in model.parameters()}
    return len(ids) == len(set(ids)) and close(model.wte.weight.detach(), before - gradient)


def p20(m):
    s, model = fresh(m)
    ok = s.forward(model, "## the") == [301] + s.forward(model, " the")
    ok &= s.forward(model, "#") == [300] and s.forward(model, "###<|end|>") == [302, 303]
    text = "# Ä the thing\n\n## an  _other_\t€<|end|>"
    assert s.decode(model, s.forward(model, text)) == text
    return ok


for n in range(1, 21):
    check = globals()[f"p{n:02d}"]
    right, = HERE.glob(f"{n:02d}_*_right.py")
    wrong, = HERE.glob(f"{n:02d}_*_wrong.py")
    r, w = load(right), load(wrong)
    assert wrong.read_text().startswith("WHAT = ") and w.WHAT and r.subject.declares == w.subject.declares
    a, b = check(r), check(w)
    print(f"{n:02d}", "ok" if a and not b else f"NOT ok: right {a}, wrong {b}")
