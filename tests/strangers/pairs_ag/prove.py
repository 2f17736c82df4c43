"""For each pair: the wrong one is wrong and the right one right, by plain torch."""
import importlib.util
import math
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from veriformer.properties import DrawnConfig  # sizes alone

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32)


def load(n, which):
    path = next(HERE.glob(f"{n:02d}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(a, b, tol=1e-4):
    return torch.allclose(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=tol, atol=tol)


def built(s, dtype=torch.float64):
    torch.manual_seed(0)
    m = s.build(C)
    return m.to(dtype) if isinstance(m, torch.nn.Module) else m


def plain_attention(q, k, v, allowed, scale, cap=None):
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    s = q @ k.mT * scale
    if cap:
        s = cap * torch.tanh(s / cap)
    return s.masked_fill(~allowed, -math.inf).softmax(-1) @ v


def p01(m):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 37, 8).double() for _ in range(3))
    ones = torch.ones(37, 37, dtype=torch.bool)
    return all(close(m.subject.forward(None, q, k, v, causal=c), plain_attention(q, k, v, ones.tril() if c else ones, 8 ** -0.5, 3.0)) for c in (False, True))


def p02(m):
    torch.manual_seed(1)
    q = torch.randn(2, 4, 5, 8).double().requires_grad_()
    k, v = (torch.randn(2, 2, 5, 8).double().requires_grad_() for _ in range(2))
    tril = torch.ones(5, 5, dtype=torch.bool).tril()
    a = m.subject.forward(None, q, k, v, causal=True)
    b = plain_attention(q, k, v, tril, 8 ** -0.5)
    assert close(a, b)
    g = torch.randn_like(a)
    return all(close(x, y) for x, y in zip(torch.autograd.grad(a, (q, k, v), g), torch.autograd.grad(b, (q, k, v), g)))


def p03(m):
    mod = built(m.subject)
    x = torch.randn(2, 10, 8).double()
    q, k, v = (t.view(2, 10, 2, 4).transpose(1, 2) for t in mod.to_qkv(x).chunk(3, -1))
    i = torch.arange(10)
    d = i[:, None] - i[None]
    want = mod.to_out(plain_attention(q, k, v, (d >= 0) & (d < 4), 0.5).transpose(1, 2).reshape(2, 10, 8))
    assert close(m.subject.forward(mod, x, torch.ones(2, 10, dtype=torch.bool)), want)
    return close(m.subject.forward(mod, x), want)


def p04(m):
    mod, x = built(m.subject), torch.randn(2, 6, 8).double()
    outs = []
    for ctx in m.subject.backends.values():
        with ctx():
            outs.append(m.subject.forward(mod, x))
    # the naive path against torch's own attention
    latent = mod.kv_norm(mod.wkv_a(x)[..., :6])
    kv = mod.wkv_b(latent).view(2, 6, 2, 16)
    q = mod.wq(x).view(2, 6, 2, 12)
    q = torch.cat((q[..., :8], m.apply_rotary(q[..., 8:])), -1).transpose(1, 2)
    pe = m.apply_rotary(mod.wkv_a(x)[..., 6:][:, :, None]).expand(-1, -1, 2, -1)
    k = torch.cat((kv[..., :8], pe), -1).transpose(1, 2)
    want = mod.wo(F.scaled_dot_product_attention(q, k, kv[..., 8:].transpose(1, 2), is_causal=True).transpose(1, 2).flatten(2))
    assert close(outs[0], want)
    return close(outs[1], want)


def p05(m):
    mod = built(m.subject)
    x, mem = torch.randn(2, 3, 8).double(), torch.randn(2, 5, 8).double()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    out = m.subject.forward(mod, x, mem, mask)
    mem2 = mem.clone()
    mem2[0, 3:] += 3
    short = m.subject.forward(mod, x[:1], mem[:1, :3])
    return close(out, m.subject.forward(mod, x, mem2, mask)) and close(out[:1], short)


def p06(m):
    x, pos = torch.randn(2, 2, 5, 8).double(), torch.tensor([0, 1, 4, 9, 30])
    a = pos.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(a), a)
    return close(m.subject.forward(m.subject.build(C), x, pos), torch.cat((z.real, z.imag), -1), 1e-6)


def p07(m):
    x = torch.randn(1, 2, 4, 6).double().requires_grad_()
    pos = torch.tensor([0, 1, 5, 9])
    a = pos.double()[:, None] * 500000.0 ** (-torch.arange(0, 6, 2).double() / 6)
    want = torch.view_as_real(torch.view_as_complex(x.reshape(1, 2, 4, 3, 2)) * torch.polar(torch.ones_like(a), a)).flatten(-2)
    got = m.subject.forward(None, x, pos)
    assert close(got, want)
    g = torch.randn_like(got)
    return close(torch.autograd.grad(got, x, g)[0], torch.autograd.grad(want, x, g)[0])


def p08(m):
    mod = built(m.subject)

    def bucket(r):
        n, side = abs(r), 4 * (r > 0)
        return side + (n if n < 2 else min(3, 2 + int(math.log(n / 2) / math.log(8) * 2)))

    idx = torch.tensor([[bucket(j - i) for j in range(24)] for i in range(24)])
    return close(m.subject.forward(mod, 24, 24), mod.relative_attention_bias.weight[idx].permute(2, 0, 1))


def p09(m):
    x = torch.randn(2, 3, 8).double() * 2 + 1
    return close(m.subject.forward(built(m.subject), x), F.layer_norm(x, (8,)))


def p10(m):
    mod, x = built(m.subject), torch.randn(2, 4, 8).double() * 3
    keep = x.clone()
    want = m.subject.forward(mod, x).detach()
    norm = lambda h, n: F.rms_norm(h, (8,), n.weight, 1e-6)
    h = x + mod.attention(norm(x, mod.attention_norm))
    assert close(want, h + mod.feed_forward(norm(h, mod.ffn_norm)))
    with torch.no_grad():
        got = m.subject.forward(mod, x)
    return close(got, want) and torch.equal(x, keep)


def p11(m):
    mod, x = built(m.subject), torch.randn(2, 5, 8).double()
    w = m.subject.router(mod, x)
    assert close(w.sum(-1), torch.ones(2, 5)) and ((w > 0).sum(-1) == 2).all()
    every = torch.stack([F.relu(x @ a) @ b for a, b in zip(mod.w_in, mod.w_out)], -2)
    return close(m.subject.forward(mod, x), (w[..., None] * every).sum(-2))


def p12(m):
    mod, x = built(m.subject), torch.randn(2, 7, 8).double()
    return close(m.subject.forward(mod, x), mod.chunk_forward(x))


def p13(m):
    torch.manual_seed(1)
    logits, labels = torch.randn(2, 6, 11).double() * 2, torch.randint(0, 11, (2, 6))
    labels[0, :2] = -100
    return close(m.subject.forward(None, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def p14(m):
    torch.manual_seed(1)
    logits, labels = (torch.randn(2, 6, 11).double() * 2).requires_grad_(), torch.randint(0, 11, (2, 6))
    labels[0, :2] = -100
    got = m.subject.forward(m.subject.build(C), logits, labels)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * logits.logsumexp(-1)[labels != -100].square().mean()
    assert close(got, want)
    return close(torch.autograd.grad(got, logits)[0], torch.autograd.grad(want, logits)[0], 1e-6)


def p15(m):
    mod = m.subject.build(DrawnConfig(vocab_size=1000))
    tokens = torch.randint(3, 1000, (64, 256))
    inputs, labels = m.subject.forward(mod, tokens, 7)
    chosen = labels != -100
    share = chosen.double().mean()
    assert abs(share - 0.15) < 0.01 and (labels[chosen] == tokens[chosen]).all() and (inputs == tokens)[~chosen].all()
    masked, kept = (inputs[chosen] == 1).double().mean(), (inputs[chosen] == tokens[chosen]).double().mean()
    return bool(abs(masked - 0.8) < 0.04 and abs(kept - 0.1) < 0.03)


def p16(m):
    mod = m.subject.build(C)
    assert m.subject.forward(mod, 5).shape == (5, 8)
    a = torch.arange(40).double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    want = torch.stack((a.sin(), a.cos()), -1).flatten(1)
    return all(close(m.subject.forward(mod, n), want[:n]) for n in (8, 9, 20, 40))


def p17(m):
    f = m.subject.build(C)

    def want(s):
        return 1e-3 * (s / 10 if s < 10 else 0.5 * (1 + math.cos(math.pi * min(1.0, (s - 10) / 90))))

    assert all(abs(f(s) - want(s)) < 1e-12 for s in range(100))
    return all(abs(f(s) - want(s)) < 1e-12 for s in (100, 101, 130))


def p18(m):
    mod = m.subject.build(C)
    groups = m.subject.forward(mod)
    ids = Counter(id(p) for g in groups for p in g["params"])
    return ids == Counter(id(p) for p in mod.parameters())


def p19(m):
    tok = m.subject.build(C)
    scores = m.subject.scores(tok)

    def best(word):
        if not word:
            return 0.0
        return max((scores[word[:i]] + best(word[i:]) for i in range(1, len(word) + 1) if word[:i] in scores), default=-math.inf)

    text = "the station and the government was able"
    assert tok.decode(tok.encode(text)) == text
    return all(abs(sum(scores[p] for p in tok.segment(w)) - best(w)) < 1e-9 for w in tok.words(text))


def p20(m):
    words = Counter(tuple(w) for t in m.CORPUS for w in m.pretokenize(t))
    tok = m.subject.build(C)
    assert all(tok.decode(tok.encode(t)) == t for t in (*m.CORPUS, "né à  l'été 漢字"))
    state = {w: list(w) for w in words}
    for pair in tok.merges:
        counts = Counter()
        for w, n in words.items():
            for p in zip(state[w], state[w][1:]):
                counts[p] += n
        if counts[pair] != max(counts.values()):
            return False
        state = {w: m.merge(s, pair, pair[0] + pair[1]) for w, s in state.items()}
    return True


if __name__ == "__main__":
    for n in range(1, 21):
        prove = globals()[f"p{n:02d}"]
        torch.manual_seed(0)
        right, wrong = prove(load(n, "right")), prove(load(n, "wrong"))
        same = load(n, "right").subject.declares == load(n, "wrong").subject.declares
        print(f"{n:02d}", "ok" if right and not wrong and same else f"BAD right={right} wrong={wrong} same={same}")
