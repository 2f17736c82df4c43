"""Each pair in plain torch: the wrong one is wrong, the right one right."""
import copy
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = SimpleNamespace(d_model=16, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32,
                    num_classes=3, dropout=0.3)


def close(a, b, tol=1e-5):
    return a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=1e-4)


def load(number, side):
    path, = HERE.glob(f"{number:02d}_*_{side}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.subject


def model(s, seed=0, train=False):
    torch.manual_seed(seed)
    m = s.build(C)
    return m.train(train) if hasattr(m, "train") else m


def ids(b, t, seed=1):
    return torch.randint(0, 11, (b, t), generator=torch.Generator().manual_seed(seed))


def numeric(f, tensor, direction, h=1e-5):
    with torch.no_grad():
        old = tensor.clone()
        tensor.copy_(old + h * direction); a = f()
        tensor.copy_(old - h * direction); b = f()
        tensor.copy_(old)
    return (a - b) / (2 * h)


def c01(s):
    m, x, ok = model(s), ids(2, 12), True
    full = s.forward(m, x)
    y = x.clone(); y[:, 2] = (y[:, 2] + 1) % 11  # two layers of window 4: seen to 2 + 6
    moved = (s.forward(m, y) - full).abs().amax((0, 2)) > 1e-6
    ok &= moved.tolist() == [2 <= t <= 8 for t in range(12)]
    assert ok  # the forward is right in both
    for parts in ([5, 3, 4], [2, 2, 2, 6], [1] * 12, [12]):
        ok &= close(s.cache(m, list(x.split(parts, 1))), full)
    left = torch.ones(2, 12, dtype=torch.bool); left[0, :3] = False
    return ok and close(s.cache(m, list(x.split([5, 1, 6], 1)), left)[left], s.forward(m, x, left)[left])


def c02(s):
    m = model(s, train=True).double()
    x, w = ids(2, 6), torch.randn(2, 6, 16, dtype=torch.double)

    def f():
        torch.manual_seed(5)
        return (s.forward(m, x) * w).sum()
    f().backward()
    p = m.blocks[0].mlp[3].weight
    d = torch.randn_like(p)
    return bool((numeric(f, p, d) - (p.grad * d).sum()).abs() < 1e-4)


def c03(s):
    m = model(s).double()
    x, w = ids(2, 6), torch.randn(2, 6, 11, dtype=torch.double)
    f = lambda: (s.forward(m, x) * w).sum()
    f().backward()
    ok = True
    for p in (m.h[0].c_fc.weight, m.h[0].attn.c_attn.weight, m.h[1].c_fc.weight, m.wte.weight):
        d = torch.randn_like(p)
        ok &= p.grad is not None and bool((numeric(f, p, d) - (p.grad * d).sum()).abs() < 1e-4)
    return ok


def c04(s):
    m = model(s)
    z = torch.randn(2, 5, 11, dtype=torch.double)
    y = ids(2, 5); y[0, 1] = -100
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    l, r = s.forward(m, a, y), F.cross_entropy(b.flatten(0, 1), y.flatten(), label_smoothing=0.1)
    assert close(l, r)
    (3 * l).backward(); (3 * r).backward()
    assert s.forward(m, z, torch.full_like(y, -100)) == 0
    return close(a.grad, b.grad)


def c05(s):
    m = model(s)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, t, e, generator=g, dtype=torch.double) for h, t, e in ((4, 3, 5), (2, 6, 5), (2, 6, 7)))
    mask = torch.rand(2, 1, 3, 6, generator=g) > 0.3; mask[..., 0] = True
    allow = mask & torch.ones(3, 6, dtype=torch.bool).tril(3)
    one = [t.clone().requires_grad_() for t in (q, k, v)]
    two = [t.clone().requires_grad_() for t in (q, k, v)]
    a = s.forward(m, *one, mask, True)
    sc = torch.einsum("bgrtk,bgsk->bgrts", two[0].view(2, 2, 2, 3, 5), two[1]) / 5 ** 0.5
    w = sc.masked_fill(~allow[:, :, None], -torch.inf).softmax(-1)
    b = torch.einsum("bgrts,bgse->bgrte", w, two[2]).reshape(2, 4, 3, 7)
    assert close(a, b)
    a.square().sum().backward(); b.square().sum().backward()
    return all(close(x.grad, y.grad) for x, y in zip(one, two))


def c06(s):
    ok = 0
    for seed in range(12):
        m = model(s, seed)
        x = ids(3, 6, seed)
        ok += torch.equal(s.generate(m, x, 10, False), s.generate(m, x, 10, True))
    print("   06 equal", ok, "of 12")
    return ok == 12


def c07(s):
    m = model(s)
    y = s.forward(m, ids(2, 5)); y.square().sum().backward()
    assert m.lm_head.weight.data_ptr() == m.embed_tokens.weight.data_ptr()
    return m.lm_head.weight is m.embed_tokens.weight


def c08(s):
    m = model(s)
    ok = True
    for t in range(0, 120):
        want = 6e-4 * t / 10 if t < 10 else 6e-5 if t >= 100 else 6e-5 + 5.4e-4 * (1 + math.cos(math.pi * (t - 10) / 90)) / 2
        ok &= abs(s.forward(m, t) - want) < 1e-9
    return ok and max(s.forward(m, t) for t in range(120)) <= 6e-4 + 1e-9


def c09(s):
    m = model(s)
    groups = s.forward(m)
    flat = [id(p) for g in groups for p in g["params"]]
    for g in groups:
        assert all((p.dim() >= 2) == (g["weight_decay"] > 0) for p in g["params"])
    return sorted(flat) == sorted(id(p) for p in m.parameters())


def c10(s):
    x = torch.randint(0, 11, (200, 100))
    inp, lab = s.forward(model(s), x, 3)
    again = s.forward(model(s), x, 3)
    assert torch.equal(again[0], inp) and torch.equal(again[1], lab)
    on = lab != -100
    assert not (on & (x < 3)).any() and torch.equal(lab[on], x[on]) and torch.equal(inp[~on], x[~on])
    share = on.sum().item() / (x >= 3).sum().item()
    kept = (inp == x)[on].double().mean().item()
    masked = (inp == 2)[on].double().mean().item()
    print("   10 share", round(share, 3), "kept", round(kept, 3), "masked", round(masked, 3))
    return abs(share - 0.3) < 0.015 and abs(masked - 0.8) < 0.02 and abs(kept - 0.1 - 0.1 / 8) < 0.02


def c11(s):
    m = model(s)
    x = torch.randn(3, 5, 16)
    plain = x + m.attention(m.norm1(x), None)
    plain = plain + m.mlp(m.norm2(plain))
    ok = close(s.forward(m, x), plain)
    m.train()  # a branch alone: its mean over draws is the branch of evaluation
    b = torch.ones(20000, 1, 1)
    mean = m.drop_path(b).mean()
    m.eval()
    return ok and bool((mean - m.drop_path(b).mean()).abs() < 0.03)


def c12(s):
    m, x = model(s), ids(3, 7)
    mask = torch.ones(3, 7, dtype=torch.bool); mask[0, 4:] = False; mask[2, :2] = False
    y, ok = s.forward(m, x, mask), True
    for b in range(3):
        alone = s.forward(m, x[b:b + 1][:, mask[b]])
        ok &= close(y[b, mask[b]], alone[0])
    return ok


def c13(s):
    m, ok = model(s), True
    for t in (1, 2, 4, 5, 6, 9, 12, 13):
        x, y = ids(2, t), ids(2, t, 7)
        if t > 3:
            y[0, 2] = -100
        z = s.forward(m, x)
        want = F.cross_entropy(z[:, :-1].reshape(-1, 11), y[:, 1:].reshape(-1)) if t > 1 else torch.zeros(())
        ok &= close(s.loss(m, x, labels=y), want)
    return ok


def c14(s):
    m, x = model(s), torch.randn(2, 5, 16)
    with s.backends["adapters"]():
        a = s.forward(m, x)
    with s.backends["merged"]():
        b = s.forward(m, x)
    return close(a, b)


def c15(s):
    m, x = model(s), ids(3, 8)
    mask = torch.ones(3, 8, dtype=torch.bool); mask[0, :3] = False; mask[1, :1] = False
    order, ok = torch.tensor([1, 2, 0]), True
    assert close(s.cache(m, list(x.split([4, 1, 3], 1)), mask)[mask], s.forward(m, x, mask)[mask])
    y = s.cache(m, list(x.split([4, 1, 3], 1)), mask, order)
    whole = torch.cat([x[order, :4], x[:, 4:]], 1)
    wm = torch.cat([mask[order, :4], mask[:, 4:]], 1)
    assert close(y[:, :4][mask[:, :4]], s.forward(m, x, mask)[:, :4][mask[:, :4]])
    ref = s.forward(m, whole, wm)
    alone = s.forward(m, whole[2:, 3:])  # the reference is right itself: padding on the left changes nothing
    assert close(ref[2, 3:], alone[0])
    return close(y[:, 4:], ref[:, 4:])


def c16(s):
    ok = True
    for seed in range(4):
        m = model(s, seed)
        for k in range(4):
            x = ids(2, 6, 10 * seed + k)
            ok &= torch.equal(s.generate(m, x, 6, True), s.generate(m, x, 6, False))
    return ok


def c17(s):
    m, x, ok = model(s), ids(3, 11), True
    assert close(s.cache(m, list(x.split([6, 1, 4], 1))), s.forward(m, x))
    for first in (3, 4, 6):
        order = torch.tensor([1, 1, 0])
        y = s.cache(m, list(x.split([first, 1, 10 - first], 1)), reorder=order)
        whole = torch.cat([x[order, :first], x[:, first:]], 1)
        ok &= close(y[:, first:], s.forward(m, whole)[:, first:]) and close(y[:, :first], s.forward(m, x)[:, :first])
    return ok


def c18(s):
    m, x, ok = model(s), ids(4, 5), True
    out, probs = s.sampling(m, x, 4, temperature=0.7, top_k=3)
    for i in range(4):
        z = s.forward(m, out[:, :5 + i])[:, -1] / 0.7
        top, where = z.topk(3)
        ok &= close(probs[:, i], torch.zeros_like(z).scatter(-1, where, top.softmax(-1)))
    plain = s.sampling(m, x, 2)[1]
    return ok and close(plain[:, 0], s.forward(m, x)[:, -1].softmax(-1))


def c19(s):
    m, x = model(s), ids(2, 8)
    x[0, 3:5] = 0
    w = torch.randn(2, 8, 16)
    (s.forward(m, x) * w).sum().backward()
    assert not m.embed.weight[0].any() and m.embed.weight.grad[1:].any()
    return not m.embed.weight.grad[0].any()


def c20(s):
    m, x = model(s), ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.bool); mask[0, 5:] = False
    first = s.cache(m, list(x.split([6, 1, 1], 1)), mask)
    assert close(first[mask], s.forward(m, x, mask)[mask])
    return close(s.cache(m, list(x.split([4, 4], 1))), s.forward(m, x))


for n in range(1, 21):
    check = globals()[f"c{n:02d}"]
    right, wrong = bool(check(load(n, "right"))), bool(check(load(n, "wrong")))
    print(f"{n:02d}", "ok" if right and not wrong else f"NOT OK right={right} wrong={wrong}")
