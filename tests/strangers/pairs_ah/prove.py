"""Shows of each pair, in plain torch, that the wrong one is wrong and the right one right."""
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = dict(vocab_size=11, d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=20, max_len=32, num_classes=3,
             dropout=0.0, d_head=4)


def load(number, which):
    path = next(HERE.glob(f"{number:02d}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(m, double=True, **sizes):
    torch.manual_seed(0)
    model = m.subject.build(SimpleNamespace(**{**SIZES, **sizes}))
    model = model.double() if double else model
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.5)
            else:
                p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def tokens(b, t, seed=1):
    return torch.randint(0, 11, (b, t), generator=torch.Generator().manual_seed(seed))


def near(a, b, tol=1e-9):
    return bool((a - b).abs().max() < tol)  # NaN is far


def randn(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention(q, k, v, seen=None):
    r = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    return s.softmax(-1) @ v


def p01(m):
    model, x = build(m), tokens(2, 14)
    full = m.subject.forward(model, x)
    ones = near(full, m.subject.cache(model, list(x.split(1, 1))))
    assert ones
    changed = x.clone(); changed[:, 0] = (changed[:, 0] + 1) % 11  # two layers of 5 reach 8 back
    g = m.subject.forward(model, changed)
    assert near(full[:, 9:], g[:, 9:]) and not near(full[:, 8], g[:, 8])
    return near(full, m.subject.cache(model, [x[:, :6], x[:, 6:9], x[:, 9:14]]))


def p02(m):
    model, x = build(m), tokens(3, 9)
    full = m.subject.forward(model, x)
    assert near(full, m.subject.cache(model, [x[:, :4], x[:, 4:6], x[:, 6:]]))
    order = torch.tensor([1, 2, 0])
    head, rest = x[:, :4], x[:, 4:]
    want = m.subject.forward(model, torch.cat([head[order], rest], 1))[:, 4:]
    return near(want, m.subject.cache(model, [head, rest], reorder=order)[:, 4:])


def p03(m):
    model, x = build(m), tokens(1, 5).expand(20000, 5)
    torch.manual_seed(3)
    ids, dist = m.subject.sampling(model, x, 1, temperature=0.5)
    logits = m.subject.forward(model, x[:1])[0, -1]
    assert near(dist[0, 0].softmax(-1), (logits / 0.5).softmax(-1))
    share = torch.bincount(ids[:, -1], minlength=11) / 20000
    return (share - (logits / 0.5).softmax(-1)).abs().max() < 0.02


def p04(m):
    model, x = build(m), tokens(3, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [1] * 6]).bool()
    out = m.subject.forward(model, x, mask)
    each = all(near(out[i][mask[i]], m.subject.forward(model, x[i][mask[i]][None])[0]) for i in range(3))
    plain = m.subject.forward(model, x)
    return each and near(plain, torch.cat([m.subject.forward(model, r[None]) for r in x]))


def p05(m):
    model, x = build(m, dropout=0.3).train(), tokens(2, 5)
    way = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    aim = randn(2, 5, 11)

    def loss():
        torch.manual_seed(7)
        return (m.subject.forward(model, x) * aim).sum()

    grads = torch.autograd.grad(loss(), list(model.parameters()))
    slope = sum((g * way[n]).sum() for g, n in zip(grads, way))
    h, values = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.add_(sign * h * way[n])
            values.append(loss())
            for n, p in model.named_parameters():
                p.sub_(sign * h * way[n])
    quotient = (values[0] - values[1]) / (2 * h)
    return abs(quotient - slope) < 1e-3 * (abs(slope) + 1)


def p06(m):
    model, x, y = build(m), tokens(2, 5), tokens(2, 5, 5)
    y[0, 1] = -100
    params = list(model.parameters())
    want = F.cross_entropy(m.subject.forward(model, x).flatten(0, 1), y.flatten())
    got = m.subject.loss(model, x, y)
    assert near(want, got)
    a, b = torch.autograd.grad(want, params), torch.autograd.grad(got, params)
    return all(near(i, j) for i, j in zip(a, b))


def p07(m):
    torch.manual_seed(0)
    model = m.subject.build(SimpleNamespace(**{**SIZES, "d_model": 64, "d_ff": 256, "num_layers": 8}))
    want = 0.02 / math.sqrt(16)
    assert abs(model.transformer["wte"].weight.std() / 0.02 - 1) < 0.1
    return all(abs(p.std() / want - 1) < 0.1 for n, p in model.named_parameters() if n.endswith("c_proj.weight"))


def p08(m):
    model, x = build(m), tokens(2, 6)
    h = model.embed_tokens(x)
    for layer in model.layers:
        h = h + layer.self_attn(layer.input_layernorm(h))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    want = model.lm_head(h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * model.norm.weight)
    return near(want, m.subject.forward(model, x))


def p09(m):
    model, good = build(m), True
    for seed in range(10):
        x = tokens(2, 5, seed)
        want = m.subject.generate(model, x, 9, False)
        got = m.subject.generate(model, x, 9, True)
        assert got.shape == want.shape
        good = good and torch.equal(want, got)
    return good


def p10(m):
    model, x = build(m, double=False), tokens(2, 8)
    full = m.subject.forward(model, x)
    return near(full, m.subject.cache(model, [x[:, :3], x[:, 3:4], x[:, 4:]]), 1e-4)


def p11(m):
    q, k, v = randn(2, 6, 5, 4), randn(2, 2, 7, 4, seed=3), randn(2, 2, 7, 3, seed=4)
    for z in (q, k, v):
        z.requires_grad_()
    seen = torch.ones(5, 7).bool().tril(2)
    got, want = m.subject.forward(None, q, k, v, causal=True), attention(q, k, v, seen)
    assert near(got, want)
    aim = randn(*got.shape, seed=6)
    a, b = (torch.autograd.grad((o * aim).sum(), (q, k, v)) for o in (got, want))
    assert near(a[0], b[0])
    return near(a[1], b[1]) and near(a[2], b[2])


def p12(m):
    model, good = build(m), True
    for t in (1, 4, 7, 8, 13, 20):
        x = randn(2, t, 16)
        q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in model.to_qkv(x).chunk(3, -1))
        i = torch.arange(t)
        d = i[:, None] - i[None]
        want = model.to_out(attention(q, k, v, (d >= 0) & (d < m.WINDOW)).transpose(1, 2).flatten(2))
        good = good and near(want, m.subject.forward(model, x))
    return good


def p13(m):
    model, x = build(m), tokens(3, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1] * 7]).bool()
    whole = m.subject.forward(model, x)
    y = x.clone(); y[:, 2] = (y[:, 2] + 1) % 11
    assert not near(whole[:, 0], m.subject.forward(model, y)[:, 0])  # the prefix sees both ways
    y = x.clone(); y[:, 3] = (y[:, 3] + 1) % 11
    assert near(whole[:, :3], m.subject.forward(model, y)[:, :3])  # and no more than the prefix
    out = m.subject.forward(model, x, mask)
    return all(near(out[i][mask[i]], m.subject.forward(model, x[i][mask[i]][None])[0]) for i in range(3))


def p14(m):
    good = True
    for heads in (4, 8):
        model, x = build(m, num_heads=heads), randn(2, 6, 16)
        q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in model.in_proj(x).chunk(3, -1))
        i = torch.arange(6)
        slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)]).double()
        s = q @ k.transpose(-1, -2) / math.sqrt(16 // heads) + slopes[:, None, None] * (i[None] - i[:, None])
        s = s.masked_fill(i[None] > i[:, None], -math.inf)
        want = model.out_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        good = good and near(want, m.subject.forward(model, x), 1e-7)
    return good


def p15(m):
    model = build(m)
    relative = torch.arange(300)[None] - torch.arange(300)[:, None]
    n, out = 16, (relative > 0).long() * 16
    d = relative.abs()
    large = 8 + (torch.log(d.float() / 8) / math.log(128 / 8) * (n - 8)).clamp(min=-8).long()
    bucket = out + torch.where(d < 8, d, large.clamp(max=n - 1))
    return near(model.relative_attention_bias.weight[bucket].permute(2, 0, 1), m.subject.forward(model, 300, 300))


def p16(m):
    model, good = build(m), True
    for t in (5, 9, 20, 40):
        x, p = randn(2, 3, t, 4), torch.arange(t)
        angle = p.double()[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
        z = torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
        good = good and near(torch.view_as_real(z).flatten(-2), m.subject.forward(model, x, p))
    return good


def p17(m):
    good = True
    for s in (3, 4, 9, 13):
        q, k, v = randn(2, 4, 3, 5), randn(2, 2, s, 5, seed=3), randn(2, 2, s, 5, seed=4)
        for causal in (False, True):
            seen = torch.ones(3, s).bool().tril(s - 3) if causal else None
            good = good and near(attention(q, k, v, seen), m.subject.forward(None, q, k, v, causal=causal))
    mask = torch.ones(2, 1, 3, 9).bool(); mask[:, :, 1] = False; mask[..., 4:8] = False
    out = m.subject.forward(None, randn(2, 4, 3, 5), randn(2, 4, 9, 5), randn(2, 4, 9, 5), attention_mask=mask)
    assert out.isfinite().all() and (out[:, :, 1] == 0).all()
    return good


def p18(m):
    good = True
    for d in (8, 12, 16, 24):
        model, x = build(m, d_model=d), randn(2, 3, d) + 1
        good = good and near(F.layer_norm(x, (d,), model.weight, model.bias), m.subject.forward(model, x))
    return good


def p19(m):
    model, x = build(m), randn(2, 7, 16)
    w, chosen = model.gate(x).softmax(-1).topk(2)
    w = w / w.sum(-1, keepdim=True)
    ys = torch.stack([e(x) for e in model.experts], -2)
    want = (ys.gather(-2, chosen[..., None].expand(*chosen.shape, 16)) * w[..., None]).sum(-2)
    assert near(m.subject.router(model, x).sum(-1), torch.ones(2, 7).double())
    return near(want, m.subject.forward(model, x))


def p20(m):
    good = True
    for v in (3, 8, 11, 13):
        x, y = randn(2, 5, v), tokens(2, 5) % v
        y[0, 0] = -100
        good = good and near(F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1), m.subject.forward(None, x, y))
    assert m.subject.forward(None, x, torch.full_like(y, -100)) == 0
    return good


if __name__ == "__main__":
    for number in range(1, 21):
        judge = globals()[f"p{number:02d}"]
        wrong, right = load(number, "wrong"), load(number, "right")
        assert isinstance(wrong.WHAT, str) and wrong.subject.declares == right.subject.declares
        verdicts = bool(judge(right)), bool(judge(wrong))
        print(f"{number:02d}", "ok" if verdicts == (True, False) else f"NOT OK {verdicts}", flush=True)
