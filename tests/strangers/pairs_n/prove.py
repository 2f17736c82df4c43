"""Shows in plain torch, for each pair, that `right` holds the fact up to rounding and `wrong` does not; builds both in two
sizes and calls them once. Run with python prove.py [NN ...]."""

import importlib.util
import math
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
f64 = torch.float64
SMALL = DrawnConfig(d_model=16, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32)
LARGE = DrawnConfig(
    d_model=32, num_heads=2, num_key_value_heads=1, num_layers=3, d_ff=36, vocab_size=23, max_len=48, dropout=0.3
)


def load(path):
    spec = importlib.util.spec_from_file_location("pair_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def twins(pair, c=SMALL, train=False, noise=0.3):
    """Both models in float64, with the same random weights."""
    torch.manual_seed(1)
    a, b = pair.right.build(c), pair.wrong.build(c)
    if isinstance(a, torch.nn.Module):
        with torch.no_grad():
            for p in a.parameters():
                p.add_(torch.randn_like(p) * noise)
        a.to(f64).train(train), b.to(f64).train(train)
        b.load_state_dict(a.state_dict())
    return a, b


def worst(x, y):
    d = (x - y).abs().max().item()
    return math.inf if math.isnan(d) else d


def rnd(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=f64) * scale


def attention(q, k, v, mask=None, causal=False):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    ok = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    if causal:
        ok = ok.tril(k.shape[-2] - q.shape[-2])
    if mask is not None:
        ok = ok & mask
    s = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~ok, -1e300)
    return (s.softmax(-1).masked_fill(~ok, 0.0)) @ v


def each(pair, measure, c=SMALL, **kw):
    a, b = twins(pair, c, **kw)
    return measure(pair.right, a), measure(pair.wrong, b)


def kernel(pair, T, S, H=4, G=2, causal=False, grad=False, masked=False):
    def measure(s, m):
        q, k, v = (rnd(2, n, t, 8, seed=i).requires_grad_() for i, (n, t) in enumerate(((H, T), (G, S), (G, S))))
        mask = (rnd(2, 1, T, S, seed=9) > 0) if masked else None
        out, ref = s.forward(m, q, k, v, attention_mask=mask, causal=causal), attention(q, k, v, mask, causal)
        if not grad:
            return worst(out, ref)
        w = rnd(*out.shape, seed=5)
        got, exp = (torch.autograd.grad((o * w).sum(), (q, k, v)) for o in (out, ref))
        return max(worst(x, y) for x, y in zip(got, exp))

    return each(pair, measure)


def p01(pair):
    r = [kernel(pair, T, S, causal=c, masked=m) for T, S in ((1, 1), (5, 6), (7, 3)) for c in (0, 1) for m in (0, 1)]
    g = kernel(pair, 5, 6, causal=True, grad=True, masked=True)
    return max(x for x, _ in (*r, g)), kernel(pair, 5, 6)[1]


def p02(pair):
    sizes = ((1, 1), (5, 6), (40, 40), (33, 50), (50, 33), (70, 70))
    r = [kernel(pair, T, S, causal=c, masked=m) for T, S in sizes for c in (0, 1) for m in (0, 1)]
    g = kernel(pair, 40, 40, causal=True, grad=True, masked=True)
    return max(x for x, _ in (*r, g)), kernel(pair, 20, 20, causal=True)[1]


def p03(pair):
    r = [kernel(pair, 5, 6, causal=c, grad=g, masked=m) for c in (0, 1) for g in (0, 1) for m in (0, 1)]
    assert kernel(pair, 5, 6, H=2, G=2, grad=True)[1] < 1e-9 and kernel(pair, 5, 6)[1] < 1e-9
    return max(x for x, _ in r), kernel(pair, 5, 6, grad=True)[1]


def p04(pair):
    def measure(s, m):
        x = rnd(3, 4, 37, scale=5)
        x[0, :, :16] = -math.inf
        x[1, 0, 16:] = -math.inf
        x[2, 1, 3] = 1e30
        y = x.movedim(-1, 1)
        return max(worst(s.forward(m, x), x.softmax(-1)), worst(s.forward(m, y, dim=1), y.softmax(1)))

    return each(pair, measure)


def p05(pair):
    def measure(s, m):
        x, memory = rnd(2, 4, 16).requires_grad_(), rnd(2, 5, 16, seed=1).requires_grad_()
        mask = torch.tensor([[1, 1, 0, 1, 0], [0] * 5]).bool()
        out = s.forward(m, x, memory, mask)
        assert worst(out[1], torch.zeros(4, 16, dtype=f64)) == 0
        alone = s.forward(m, x[:1], memory[:1, [0, 1, 3]])
        assert worst(out[:1], alone) < 1e-12
        grads = torch.autograd.grad(out.square().sum(), [x, memory, *m.parameters()])
        return 0.0 if all(g.isfinite().all() for g in grads) else math.inf

    return each(pair, measure)


def p06(pair):
    def measure(s, m):  # more padding on the left shifts all positions, and must change nothing
        x = rnd(1, 6, 16)
        moved = torch.cat([rnd(1, 3, 16, seed=2), x], 1)
        mask = torch.tensor([[0] * 3 + [1] * 6]).bool()
        assert worst(s.forward(m, x)[:, :4], s.forward(m, x[:, :4])) < 1e-12
        return worst(s.forward(m, x), s.forward(m, moved, mask)[:, 3:])

    return each(pair, measure)


def p07(pair):
    def measure(s, m):
        errors = []
        for d, offset in ((16, 0.0), (16, 50.0)):
            x = rnd(2, 3, d) + offset
            errors.append(worst(s.forward(m, x), F.layer_norm(x, (d,), m.weight, m.bias, m.eps)))
        return max(errors)

    odd = each(pair, lambda s, m: worst(s.forward(m, rnd(2, 3, 7)), F.layer_norm(rnd(2, 3, 7), (7,), m.weight, m.bias, m.eps)), DrawnConfig(d_model=7, num_heads=1))
    a = each(pair, measure)
    return max(a[0], odd[0]), a[1]


def p08(pair):
    def measure(s, m):
        x = rnd(2, 5, 16)
        h = x + m.attention(m.layernorm_before(x))
        h = h + m.output(F.gelu(m.intermediate(m.layernorm_after(h)), approximate="tanh"))
        return worst(s.forward(m, x), h)

    return each(pair, measure)


def p09(pair):
    def measure(s, m):
        x = rnd(2, 5, 16)
        gates = s.router(m, x)
        assert worst(gates.sum(-1), torch.ones(2, 5, dtype=f64)) < 1e-12
        every = torch.stack([F.silu(x @ u) @ d for u, d in zip(m.experts.up, m.experts.down)], -2)
        return worst(s.forward(m, x), (gates[..., None] * every).sum(-2))

    return each(pair, measure)


def p10(pair):
    def measure(s, m):
        errors = []
        for c in (DrawnConfig(d_model=8), DrawnConfig(d_model=7, num_heads=1)):
            for calls in ((20,), (5, 9, 30), (4,)):
                model = s.build(c)
                for n in calls:
                    got = s.forward(model, n)
                    p, i = torch.arange(n, dtype=f64)[:, None], torch.arange(c.d_model)
                    angle = p / 10000 ** ((i - i % 2).to(f64) / c.d_model)
                    errors.append(worst(got.to(f64), torch.where(i % 2 == 0, angle.sin(), angle.cos())))
        return max(errors)

    return each(pair, measure)


def p11(pair):
    def measure(s, m):
        x, p = rnd(2, 2, 6, 8), torch.arange(6)
        y = s.forward(m, x, p)
        z = torch.complex(x[..., :2], x[..., 2:4]) * torch.exp(1j * p.to(f64)[:, None] * torch.tensor([1.0, 0.01], dtype=f64))
        return worst(y, torch.cat([z.real, z.imag, x[..., 4:]], -1))

    return each(pair, measure)


def p12(pair):
    def published(rel):  # the authors' rule, one number at a time
        out, n = (8 if rel > 0 else 0), abs(rel)
        return out + (n if n < 4 else min(7, 4 + int(math.log(n / 4) / math.log(32 / 4) * 4)))

    def measure(s, m):
        T, S = 9, 40
        b = torch.tensor([[published(j - i) for j in range(S)] for i in range(T)])
        return worst(s.forward(m, T, S), m.relative_attention_bias.weight[b].permute(2, 0, 1))

    return each(pair, measure)


def p13(pair):
    def measure(s, m):  # a sample whose two branches are dropped comes out as it went in; share of them p^2
        x, kept, partly = rnd(4, 6, 16), 0, 0
        torch.manual_seed(0)
        for _ in range(200):
            same = (s.forward(m, x) - x).abs().amax(-1) == 0  # [B, T]
            kept += same.all(1).sum().item()
            partly += (same.any(1) & ~same.all(1)).sum().item()
        assert s is pair.wrong or abs(kept / 800 - 0.3**2) < 0.05
        return float(partly)

    c = DrawnConfig(d_model=16, num_heads=2, dropout=0.3)
    plain = each(pair, lambda s, m: worst(s.forward(m.eval(), rnd(2, 3, 16)), s.forward(m, rnd(2, 3, 16))), c)
    assert plain == (0, 0)
    return each(pair, measure, c, train=True)


def p14(pair):
    def measure(s, m):
        errors = []
        for labels in ([[1, -100, 3], [4, 5, -100]], [[1, 2, 3], [4, 5, 6]]):
            z, y = rnd(2, 3, 11).requires_grad_(), torch.tensor(labels)
            ref = F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1)
            got = s.forward(m, z, y)
            errors += [worst(got, ref), worst(*(torch.autograd.grad(t, z)[0] for t in (got, ref)))]
        empty = s.forward(m, rnd(2, 3, 11), torch.full((2, 3), -100))
        return max(*errors, abs(empty.item()))

    return each(pair, measure)


def p15(pair):
    def measure(s, m):
        z, y = rnd(3, 4, 11), torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(0))
        ref = torch.stack([-z[b, t].log_softmax(-1)[y[b, t + 1]] for b in range(3) for t in range(3)]).mean()
        assert abs(s.forward(m, z[:1], y[:1]) - F.cross_entropy(z[0, :-1], y[0, 1:])) < 1e-12
        return worst(s.forward(m, z, y), ref)

    a, b = each(pair, measure)
    assert pair.right.forward(pair.right.build(SMALL), rnd(2, 1, 11), torch.ones(2, 1).long()) == 0
    return a, b


def p16(pair):
    def measure(s, m):
        x = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        ids, probs = s.sampling(m, x, 5, temperature=0.7, top_k=3)
        errors = []
        for t in range(5):
            z = s.forward(m, ids[:, : 3 + t])[:, -1] / 0.7
            top = torch.zeros_like(z).scatter(1, z.topk(3).indices, 1.0).bool()
            errors.append(worst(probs[:, t], z.masked_fill(~top, -math.inf).softmax(-1)))
        return max(errors)

    return each(pair, measure)


def p17(pair):
    def measure(s, m):
        x = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(0))
        assert worst(s.cache(m, [x[:, :3], x[:, 3:4], x[:, 4:]]), s.forward(m, x)) < 1e-10
        order = torch.tensor([1, 2, 0])
        got = s.cache(m, [x[:, :3], x[:, 3:]], reorder=order)
        return worst(got[:, 3:], s.forward(m, torch.cat([x[order, :3], x[:, 3:]], 1))[:, 3:])

    return each(pair, measure)


def p18(pair):
    def measure(s, m):
        x = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
        whole = s.forward(m, x)
        errors = [worst(s.cache(m, list(x.split(n, 1))), whole) for n in (1, 2, 5, 12, (5, 1, 1, 3, 2))]
        if s is pair.wrong:
            assert errors[2] < 1e-10 > errors[3]
        changed = x.clone()
        changed[:, 0] = (x[:, 0] + 1) % 11  # two layers of window 4 reach back 6 steps
        assert worst(s.forward(m, changed)[:, 7:], whole[:, 7:]) < 1e-10
        return max(errors)

    return each(pair, measure)


def p19(pair):
    def measure(s, m):
        x = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(2, 9).bool()
        mask[0, :3] = False
        whole = s.forward(m, x, mask)
        assert worst(whole[:1, 3:], s.forward(m, x[:1, 3:])) < 1e-10
        assert worst(s.cache(m, [x[:, :5], x[:, 5:]]), s.forward(m, x)) < 1e-10
        got = s.cache(m, [x[:, :5], x[:, 5:6], x[:, 6:]], mask)
        return worst(got[mask], whole[mask])

    return each(pair, measure)


def p20(pair):
    def measure(s, m):  # how far the fate of what is predicted lies from 80, 10, 10
        m = s.build(DrawnConfig(vocab_size=100))
        x = torch.randint(100, (200, 200), generator=torch.Generator().manual_seed(0))
        inputs, labels = s.forward(m, x, 3)
        chosen = labels != -100
        assert torch.equal(labels[chosen], x[chosen]) and not (chosen & (x < 4)).any()
        assert torch.equal(inputs[~chosen], x[~chosen])
        n, masked = chosen.sum(), (inputs == 3) & chosen
        shares = [chosen.sum() / (x >= 4).sum(), masked.sum() / n, (chosen & (inputs == x)).sum() / n]
        return max(abs(float(a) - b) for a, b in zip(shares, (0.15, 0.8, 0.1)))

    a, b = each(pair, measure)
    return (a if a > 0.02 else 0.0), b


def p21(pair):
    def measure(s, m):
        scores, worst_gap = s.scores(m), 0.0
        names = {i: p for p, i in s.vocabulary(m).items()}
        for text in ("nation", "the moment", "for another light", "in", "illness and ten"):
            ids = s.forward(m, text)
            assert "".join(names[i] for i in ids).replace("▁", " ") == text
            for word in s.words(m, text):
                word, top = "".join(word), -math.inf
                for cuts in product((0, 1), repeat=len(word) - 1):
                    at = [0, *(i + 1 for i, c in enumerate(cuts) if c), len(word)]
                    top = max(top, sum(scores.get(word[i:j], -1e9) for i, j in zip(at, at[1:])))
                worst_gap = max(worst_gap, top - sum(scores[p] for p in m.segment(word)))
        return worst_gap

    return each(pair, measure)


def p22(pair):
    def measure(s, m):
        f = pair.right.declares
        w, S, peak, floor = f["warmup_steps"], f["total_steps"], f["peak"], f["floor"]
        errors = []
        for step in range(w, S + 20):
            u = min(1.0, (step - w) / (S - w))
            errors.append(abs(s.forward(m, step) - (floor + (peak - floor) * (1 + math.cos(math.pi * u)) / 2)) / peak)
        assert all(0 < s.forward(m, t) < s.forward(m, t + 1) for t in range(w))
        return max(errors)

    return each(pair, measure)


def once(s, c):
    """Build in these sizes and call the forward once."""
    m, k, D = s.build(c), s.kind, c.d_model
    x, tokens = torch.randn(2, 5, D), torch.randint(c.vocab_size, (2, 5))
    args = {
        "softmax": (torch.randn(2, 5),),
        "attention": tuple(torch.randn(2, h, 5, c.d_head) for h in (c.num_heads, c.num_key_value_heads, c.num_key_value_heads)),
        "cross_attention": (x, torch.randn(2, 4, D)),
        "positions": (12,),
        "rotary": (torch.randn(2, c.num_heads, 5, c.d_head), torch.arange(5)),
        "position_bias": (4, 6),
        "decoder": (tokens,),
        "loss": (torch.randn(2, 5, c.vocab_size), tokens),
        "masking": (tokens, 0),
        "schedule": (3,),
        "tokenizer": ("the nation",),
    }.get(k, (x,))
    out = s.forward(m, *args)
    for part in out if isinstance(out, tuple) else (out,):
        if torch.is_tensor(part):
            assert part.isfinite().all()
    if k in ("self_attention", "layer", "norm", "feed_forward"):
        assert out.shape == x.shape
    if k in ("self_attention", "layer"):
        s.forward(m, x, attention_mask=torch.ones(2, 5).bool())


def main():
    failed = False
    for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
        number = path.stem[:2]
        if sys.argv[1:] and number not in sys.argv[1:]:
            continue
        pair = load(path)
        assert pair.right.declares == pair.wrong.declares and pair.right.kind == pair.wrong.kind
        assert pair.WHAT and pair.CAUSE
        for c in (SMALL, LARGE):
            for s in (pair.right, pair.wrong):
                once(s, c)
        a, b = globals()["p" + number](pair)
        limit = 1e-6 if number == "10" else 1e-9
        good = a < limit and (b > 1e-3 or math.isnan(b))
        failed |= not good
        print(f"{path.stem:28s} right {a:.2e}  wrong {b:.2e}  {'ok' if good else 'NOT SHOWN'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
