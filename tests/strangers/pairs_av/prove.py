"""For each pair: the wrong one differs from an independent reference, the right one does not. Plain torch."""
import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=32)


def load(path):
    name = "pair_" + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def make(module, seed=0):
    torch.manual_seed(seed)
    build = module.subject.build
    model = build(C) if build else None
    if isinstance(model, nn.Module):
        model = model.double().eval()
    torch.manual_seed(seed + 1)
    return model, module.subject


def gap(a, b):
    return float((a - b).abs().max())


def p01(mod):
    _, s = make(mod)
    return max(
        gap(s.forward(None, x, dim=d), x.softmax(d))
        for n in (3, 4, 10, 16)
        for x in [torch.randn(2, n, n, dtype=torch.float64)]
        for d in (-1, 1)
    )


def p02(mod):
    _, s = make(mod)
    worst = 0.0
    for T, S in ((5, 5), (40, 40), (17, 33)):
        q, k, v = (torch.randn(2, h, n, e, dtype=torch.float64) for h, n, e in ((4, T, 6), (2, S, 6), (2, S, 5)))
        kk, vv = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        causal = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        mask = torch.rand(2, 1, T, S) > 0.2
        mask[..., 0] = True
        worst = max(worst, gap(s.forward(None, q, k, v, causal=True), F.scaled_dot_product_attention(q, kk, vv, causal)))
        worst = max(worst, gap(s.forward(None, q, k, v, mask), F.scaled_dot_product_attention(q, kk, vv, mask)))
        both = F.scaled_dot_product_attention(q, kk, vv, mask & causal)
        worst = max(worst, gap(s.forward(None, q, k, v, mask, True), both))
    return worst


def p03(mod):
    m, s = make(mod)
    worst = 0.0
    for t in (1, 4, 7, 13):
        x = torch.randn(2, t, 8, dtype=torch.float64)
        pad = torch.ones(2, t, dtype=torch.bool)
        pad[1, max(1, t - 2) :] = False
        q, k, v = (z.view(2, t, 2, 4).transpose(1, 2) for z in m.to_qkv(x).chunk(3, -1))
        back = torch.arange(t)[:, None] - torch.arange(t)
        allowed = ((back >= 0) & (back < 4))[None, None] & pad[:, None, None]
        allowed = allowed | torch.eye(t, dtype=torch.bool)
        y = m.to_out(F.scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2).reshape(2, t, 8))
        worst = max(worst, gap(s.forward(m, x, pad)[pad], y[pad]))
    return worst


def p04(mod):
    m, s = make(mod)
    x, mem = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 6, 8, dtype=torch.float64)
    lengths = (6, 2, 4)
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    alone = torch.cat([s.forward(m, x[i : i + 1], mem[i : i + 1, :n]) for i, n in enumerate(lengths)])
    return gap(s.forward(m, x, mem, mask), alone)


def p05(mod):
    m, s = make(mod)
    ref = torch.tensor(
        [[(math.sin, math.cos)[i % 2](p / 10000 ** ((i - i % 2) / 8)) for i in range(8)] for p in range(30)]
    )
    return max(gap(s.forward(m, n).double(), ref[:n].double()) for n in (3, 8, 9, 21, 30, 12)) // 1e-5 * 1e-5


def p06(mod):
    m, s = make(mod)
    x, pos = torch.randn(2, 2, 5, 4, dtype=torch.float64), torch.tensor([0, 3, 4, 9, 20])
    turn = torch.exp(1j * pos[:, None] * 10000.0 ** (-torch.arange(2, dtype=torch.float64) / 2))
    z = torch.complex(x[..., :2], x[..., 2:]) * turn
    return gap(s.forward(m, x, pos), torch.cat((z.real, z.imag), -1))


def p07(mod):
    m, s = make(mod)

    def bucket(r, half=4, far=16):
        n, exact = abs(r), half // 2
        b = n if n < exact else min(half - 1, exact + int(math.log(n / exact) / math.log(far / exact) * (half - exact)))
        return b + (half if r > 0 else 0)

    w = m.relative_attention_bias.weight
    ref = torch.stack([torch.stack([w[bucket(j - i)] for j in range(26)]) for i in range(21)]).permute(2, 0, 1)
    return gap(s.forward(m, 21, 26), ref)


def p08(mod):
    worst = 0.0
    for width in (3, 4, 8, 10):
        m = mod.WelfordLayerNorm(width).double()
        x = torch.randn(2, 5, width, dtype=torch.float64) * 3 + 1
        worst = max(worst, gap(m(x), F.layer_norm(x, (width,), eps=1e-5)))
    return worst


def p09(mod):
    m, s = make(mod)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    ref = torch.zeros_like(x)
    for b in range(2):
        for t in range(7):
            p = m.gate(x[b, t]).softmax(-1)
            top = p.argsort(descending=True)[:2]
            for e in top:
                ref[b, t] += p[e] / p[top].sum() * (F.gelu(x[b, t] @ m.w1[e]) @ m.w2[e])
    return gap(s.forward(m, x), ref)


def p10(mod):
    m, s = make(mod)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    h = x + m.self_attn(F.rms_norm(x, (8,), eps=1e-6), None)
    return gap(s.forward(m, x), h + m.mlp(F.rms_norm(h, (8,), eps=1e-6)))


def p11(mod):
    m, s = make(mod)
    tokens = torch.randint(11, (3, 6))
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:] = False
    mask[2, :2] = False
    worst = gap(s.forward(m, tokens), torch.cat([s.forward(m, t[None]) for t in tokens]))
    whole = s.forward(m, tokens, mask)
    for b in range(3):
        worst = max(worst, gap(whole[b, mask[b]], s.forward(m, tokens[b, mask[b]][None])[0]))
    return worst


def p12(mod):
    m, s = make(mod)
    tokens = torch.randint(11, (2, 14))
    whole = s.forward(m, tokens)
    assert gap(s.cache(m, tokens.split(1, 1)), whole) < 1e-9
    return max(gap(s.cache(m, tokens.split(n, 1)), whole) for n in ([5, 2, 1, 3, 3], [2, 3, 9], [14]))


def p13(mod):
    m, s = make(mod)
    tokens = torch.randint(11, (3, 6))
    more = torch.randint(11, (3, 5))
    worst = 0.0
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0]):
        got = s.cache(m, [tokens, more[:, :1], more[:, 1:]], reorder=torch.tensor(order))
        ref = s.forward(m, torch.cat((tokens[order], more), 1))
        worst = max(worst, gap(got[:, 6:], ref[:, 6:]), gap(got[:, :6], s.forward(m, tokens)))
    return worst


def p14(mod):
    apart = 0
    for seed in range(6):
        m, s = make(mod, seed)
        tokens = torch.randint(11, (2, 4))
        apart += float((s.generate(m, tokens, 12, True) != s.generate(m, tokens, 12, False)).sum())
    return apart


def p15(mod):
    m, s = make(mod)
    source, target = torch.randint(11, (2, 5)), torch.randint(11, (2, 6))
    whole = s.forward(m, source, target)
    return max(gap(s.cache(m, source, target.split(n, 1)), whole) for n in (1, 2, 6))


def p16(mod):
    m, s = make(mod)
    tokens = torch.randint(11, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 7:] = False
    worst = 0.0
    for b in range(2):
        x = tokens[b, mask[b]][None]
        states = m.encoder(m.words(x) + m.places[: x.shape[1]])
        worst = max(worst, gap(s.forward(m, tokens, mask)[b], m.score(states.mean(1))[0]))
    return worst


def p17(mod):
    _, s = make(mod)
    logits, labels = torch.randn(2, 5, 11, dtype=torch.float64), torch.randint(11, (2, 5))
    labels[0, 2] = -100
    return gap(s.forward(None, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def p18(mod):
    m, s = make(mod)
    ref = [3e-4 * t / 20 for t in range(20)]
    ref += [3e-5 + 2.7e-4 * (1 + math.cos(math.pi * (t - 20) / 100)) / 2 for t in range(20, 121)] + [3e-5]
    return max(abs(s.forward(m, t) - r) for t, r in enumerate(ref)) * 1e4


def p19(mod):
    m, s = make(mod)
    inside = [id(p) for g in s.forward(m) for p in g["params"]]
    assert len(inside) == len(set(inside))
    return float(len({id(p) for p in m.parameters()} ^ set(inside)))


def p20(mod):
    m, s = make(mod)
    texts = ["the cache of the past", "the keys are the pages", "the cache of the past", "", " é 漢\n\n the"]
    worst = 0.0
    for text in texts:
        fresh = s.forward(s.build(C), text)
        ids = s.forward(m, text)
        worst += float(ids != fresh) + float(s.decode(m, ids) != text)
    return worst


failed = 0
for number in range(1, 21):
    tag = f"{number:02d}"
    right, wrong = (load(next(HERE.glob(f"{tag}_*_{w}.py"))) for w in ("right", "wrong"))
    proof = globals()["p" + tag]
    with torch.no_grad():
        r, w = proof(right), proof(wrong)
    ok = r < 1e-8 and w > 1e-3 and right.subject.declares == wrong.subject.declares and bool(wrong.WHAT)
    failed += not ok
    print(tag, "ok" if ok else "NOT", f"right {r:.1e} wrong {w:.1e}", flush=True)
sys.exit(failed)
