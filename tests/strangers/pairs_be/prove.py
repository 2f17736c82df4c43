"""Shows in plain torch that each wrong file is wrong and each right one right."""

import importlib.util
import math
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent


class C:
    d_model, num_heads, num_key_value_heads, num_layers, d_ff = 16, 4, 2, 2, 24
    vocab_size, max_len, num_classes, dropout, d_head = 11, 32, 3, 0.0, 4


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(m, seed=0):
    torch.manual_seed(seed)
    s = m.subject
    model = s.module if s.module is not None else s.build(C)
    if isinstance(model, torch.nn.Module):
        model = model.double().eval()
        for p in model.parameters():
            with torch.no_grad():
                p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return model


def near(a, b, tol=1e-9):
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and float((a - b).abs().max()) < tol


def toks(B, T, seed=1):
    return torch.randint(5, C.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def p01(m):
    model, t = build(m), toks(3, 6)
    whole = m.subject.forward(model, t)
    assert near(m.cached(model, [t[:, :4], t[:, 4:5], t[:, 5:]]), whole)
    order = [1, 2, 0]
    got = m.cached(model, [t[:, :4], t[:, 4:5], t[:, 5:]], reorder=order)
    joined = torch.cat((t[order][:, :4], t[:, 4:]), 1)
    return near(got[:, :4], whole[:, :4]) and near(got[:, 4:], m.subject.forward(model, joined)[:, 4:])


def p02(m):
    model, t = build(m), toks(2, 11)
    whole = m.subject.forward(model, t)
    assert near(m.cache(model, [t[:, :6]] + [t[:, i : i + 1] for i in range(6, 11)]), whole)
    # the uncached forward is windowed: two layers of 4 see 7 inputs
    u = t.clone()
    u[:, 2] = 5 + (u[:, 2] - 4) % 6
    far = m.subject.forward(model, u)
    assert near(far[:, 9:], whole[:, 9:]) and not near(far[:, 8:9], whole[:, 8:9])
    return near(m.cache(model, [t[:, :6], t[:, 6:9], t[:, 9:]]), whole)


def p03(m):
    model, t = build(m), toks(3, 5)
    alone = torch.cat([m.subject.forward(model, t[i : i + 1]) for i in range(3)])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    got = m.subject.forward(model, t, mask)
    same = all(near(got[i][mask[i]], m.subject.forward(model, t[i : i + 1, mask[i]])[0]) for i in range(3))
    return near(m.subject.forward(model, t), alone) and same


def p04(m):
    model, t = build(m), toks(2, 6)
    model(t)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 4:] = False
    return near(model(t, mask)[:, :4], model(t[:, :4])[:, :4])


def p05(m):
    model, s, t = build(m), toks(2, 5), toks(2, 4, 2)
    # written out anew from the pre-norm equations
    x = model.shared(t) + model.decoder_positions.weight[:4]
    see = torch.ones(4, 4).bool().tril()[None, None]
    every = torch.ones(2, 1, 1, 5).bool()
    memory = model.encode(s, every)
    for layer in model.decoder_layers:
        h = layer.self_attn_layer_norm(x)
        x = x + layer.self_attn(h, h, see)
        x = x + layer.encoder_attn(layer.encoder_attn_layer_norm(x), memory, every)
        x = x + layer.fc2(torch.relu(layer.fc1(layer.final_layer_norm(x))))
    return near(m.subject.forward(model, s, t), F.linear(model.decoder_norm(x), model.shared.weight))


def p06(m):
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, n, w, generator=g, dtype=torch.double).requires_grad_()
        for h, n, w in ((4, 3, 4), (2, 5, 4), (2, 5, 6))
    )
    out = m.attend(None, q, k, v, causal=True)
    hidden = ~torch.ones(3, 5).bool().tril(2)
    scores = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(hidden, -math.inf)
    ref = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    assert near(out, ref)
    w = torch.randn(ref.shape, generator=g, dtype=torch.double)
    got, want = torch.autograd.grad((out * w).sum(), (q, k, v)), torch.autograd.grad((ref * w).sum(), (q, k, v))
    return all(near(a, b) for a, b in zip(got, want))


def p07(m):
    x = 3 * torch.randn(4, 5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    assert near(m.online_softmax(x), x.softmax(-1)) and near(m.online_softmax(x, 1), x.softmax(1))
    return near(m.online_softmax(x, 0), x.softmax(0)) and near(m.online_softmax(x[:, :4, :4], 0), x[:, :4, :4].softmax(0))


def p08(m):
    model = build(m)
    x = torch.randn(2, 11, 16, dtype=torch.double)
    q, k, v = (t.view(2, 11, 4, 4).transpose(1, 2) for t in model.to_qkv(x).chunk(3, -1))
    see = torch.ones(11, 11).bool().tril().triu(-3)
    ref = F.scaled_dot_product_attention(q, k, v, attn_mask=see).transpose(1, 2).reshape(2, 11, 16)
    return near(model(x), model.to_out(ref))


def p09(m):
    model = build(m)
    x = torch.randn(2, 7, 16, dtype=torch.double)
    whole = model(x)
    q, k, v = (f(x).view(2, 7, 4, 4).transpose(1, 2) for f in (model.query, model.key, model.value))
    i = torch.arange(7)
    rel = model.Er[(C.max_len - 1 - (i[:, None] - i)).clamp(max=C.max_len - 1)]
    scores = (q @ k.mT + torch.einsum("bhtk,tsk->bhts", q, rel)) / 2
    p = scores.masked_fill(i[:, None] < i, -math.inf).softmax(-1)
    ref = model.out((p @ v).transpose(1, 2).reshape(2, 7, 16))
    return near(whole, ref) and all(near(model(x[:, :n]), whole[:, :n]) for n in range(1, 7))


def p10(m):
    model = build(m)
    x, memory = torch.randn(2, 3, 16, dtype=torch.double), torch.randn(2, 5, 16, dtype=torch.double)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]]).bool()
    kept = torch.stack([model(x[i : i + 1], memory[i : i + 1, mask[i]])[0] for i in range(2)])
    return near(model(x, memory, mask), kept)


def p11(m):
    model = build(m)
    x, pos = torch.randn(2, 2, 6, 16, dtype=torch.double), torch.arange(6) + 3
    z = torch.complex(x[..., :4], x[..., 4:8])
    freq = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.double)
    z = z * torch.polar(torch.ones(6, 4, dtype=torch.double), pos[:, None] * freq)
    return near(model(x, pos), torch.cat((z.real, z.imag, x[..., 8:]), -1))


def p12(m):
    model = build(m)
    table = model.relative_attention_bias.weight

    def bucket(r):  # 16 buckets: 8 a direction, of these 4 exact, 4 logarithmic up to 40
        n = abs(r)
        b = n if n < 4 else min(7, 4 + int(math.log(n / 4) / math.log(40 / 4) * 4))
        return b + 8 * (r > 0)

    ref = torch.stack([torch.stack([table[bucket(s - t)] for s in range(60)]) for t in range(50)]).permute(2, 0, 1)
    return near(model(50, 60), ref)


def p13(m):
    model = build(m)
    x = torch.randn(2, 3, 16, dtype=torch.double, requires_grad=True)
    w = torch.randn(2, 3, 16, dtype=torch.double)
    ref = F.rms_norm(x, (16,), 1 + model.weight, 1e-6)
    assert near(model(x), ref)
    got, want = (torch.autograd.grad((y * w).sum(), x)[0] for y in (model(x), ref))
    return near(got, want)


def p14(m):
    model = build(m)
    x = torch.randn(2, 5, 16, dtype=torch.double)
    p = model.gate(x).softmax(-1)
    p = p * (p >= p.topk(2, -1).values[..., -1:])
    p = p / p.sum(-1, keepdim=True)
    assert near(m.router(model, x), p)
    return near(model(x), sum(p[..., i, None] * e(x) for i, e in enumerate(model.experts)))


def p15(m):
    model = build(m)
    x, p = torch.randn(2, 5, 16, dtype=torch.double), model.p
    h = F.layer_norm(x, (16,), p["g1"], p["b1"])
    q, k, v = ((h @ p[n]).view(2, 5, 4, 4).transpose(1, 2) for n in ("wq", "wk", "wv"))
    y = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 16) @ p["wo"]
    h = F.layer_norm(y, (16,), p["g2"], p["b2"])
    y = y + F.gelu(h @ p["w_in"] + p["b_in"], approximate="tanh") @ p["w_out"] + p["b_out"]
    return near(model(x), y)


def p16(m):
    model, t = build(m), toks(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 2:] = False
    return near(model(t, mask), model(t[:, :2])) and bool(torch.isfinite(model(t)).all())


def p17(m):
    x = torch.randn(2, 6, 11, dtype=torch.double)
    y = toks(2, 6)
    y[0, 3:] = -100
    ref = F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1, ignore_index=-100)
    whole = F.cross_entropy(x.flatten(0, 1), toks(2, 6).flatten(), label_smoothing=0.1)
    assert near(m.criterion(None, x, toks(2, 6)), whole)
    return near(m.criterion(None, x, y), ref)


def p18(m):
    model = m.subject.build(type("Big", (C,), {"vocab_size": 5000}))
    t = torch.randint(0, 5000, (200, 500))
    a, b = m.forward(model, t, 3)
    again = m.forward(model, t, 3)
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])
    hit = b != -100
    assert torch.equal(a[~hit], t[~hit]) and torch.equal(b[hit], t[hit]) and not (t[hit] < 5).any()
    hidden = (a[hit] == m.MASK_ID).double().mean()
    kept = (a[hit] == t[hit]).double().mean()
    assert abs(hit.double().mean() - 0.15) < 0.01 and abs(hidden - 0.8) < 0.02
    return abs(kept - 0.1) < 0.02 and abs(1 - hidden - kept - 0.1) < 0.02


def p19(m):
    f = m.subject.build(C).get_lr

    def ref(s):
        if s < 20:
            return 6e-4 * s / 20
        r = min(1.0, (s - 20) / 180)
        return 6e-5 + 0.5 * (6e-4 - 6e-5) * (1 + math.cos(math.pi * r))

    return all(abs(f(s) - ref(s)) < 1e-12 for s in range(260))


def p20(m):
    tok = m.BPE.train(m.CORPUS, 300)
    for text in [*m.CORPUS, "  two  spaces\n", "naïve ☃", ""]:
        assert tok.decode(tok.encode(text)) == text
    # each merge is the most frequent pair of the corpus, as it stands then, counted word by word
    words = [list(w) for text in m.CORPUS for w in m.split(text)]
    for pair in tok.merges:
        counts = Counter(p for w in words for p in zip(w, w[1:]))
        if counts[pair] != max(counts.values()):
            return False
        for w in words:
            i = 0
            while i < len(w) - 1:
                if (w[i], w[i + 1]) == pair:
                    w[i : i + 2] = [w[i] + w[i + 1]]
                i += 1
    return True


for path in sorted(HERE.glob("[0-9][0-9]_*_right.py")):
    number = path.name[:2]
    wrong, right = load(path.with_name(path.name.replace("_right", "_wrong"))), load(path)
    assert wrong.WHAT and not hasattr(right, "WHAT")
    assert wrong.subject.declares == right.subject.declares and wrong.subject.kind == right.subject.kind
    prove = globals()[f"p{number}"]
    torch.manual_seed(1)
    good = prove(right)
    torch.manual_seed(1)
    bad = prove(wrong)
    print(number, "ok" if good and not bad else f"NOT OK right={good} wrong={bad}")
