"""Each pair in plain torch: the right one agrees with an independent reference, the wrong one does not."""
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent


def load(n, which):
    path = next(HERE.glob(f"{n}_*_{which}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


def sizes(**kw):
    c = dict(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=29, max_len=32,
             num_classes=3, dropout=0.0)
    c.update(kw)
    c["d_head"] = c["d_model"] // c["num_heads"]
    return SimpleNamespace(**c)


def made(mod, seed=0, std=0.4, **kw):
    """A model in float64 whose parameters are all drawn at random."""
    torch.manual_seed(seed)
    m = mod.subject.build(sizes(**kw))
    if isinstance(m, torch.nn.Module):
        m = m.double().eval()
        for p in m.parameters():
            p.data = p.data + std * torch.randn_like(p)
    return m


def close(a, b, tol=1e-6):
    return bool(torch.allclose(a, b, rtol=tol, atol=tol))


def naive_attention(q, k, v, allowed):
    B, H, T, K = q.shape
    out = torch.zeros(B, H, T, v.shape[-1], dtype=q.dtype)
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for t in range(T):
                js = [j for j in range(k.shape[2]) if allowed[b, 0, t, j]]
                if js:
                    w = (k[b, g, js] @ q[b, h, t] / math.sqrt(K)).softmax(0)
                    out[b, h, t] = w @ v[b, g, js]
    return out


def kernel(mod, shift, shapes):
    for T, S in shapes:
        torch.manual_seed(T)
        q, k, v = (torch.randn(2, h, n, 6, dtype=torch.float64) for h, n in ((4, T), (2, S), (2, S)))
        mask = torch.rand(2, 1, T, S) > 0.3
        for causal in (False, True):
            for given in (None, mask):
                allowed = torch.ones(2, 1, T, S, dtype=torch.bool) if given is None else given
                if causal:
                    allowed = allowed & torch.tensor([[j <= i + shift(T, S) for j in range(S)] for i in range(T)])
                if not close(mod.subject.forward(None, q, k, v, given, causal), naive_attention(q, k, v, allowed)):
                    return False
    return True


def p01(mod):
    return kernel(mod, lambda T, S: S - T, [(5, 5), (8, 20), (11, 30), (9, 4)])


def p02(mod):
    return kernel(mod, lambda T, S: 0, [(5, 5), (8, 20), (11, 30)])


def p03(mod):
    m = made(mod)
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    mask = (torch.rand(2, 11, 11) > 0.4) | torch.eye(11, dtype=torch.bool)
    q, k, v = (w(x).view(2, 11, 4, 4).transpose(1, 2) for w in (m.to_q, m.to_k, m.to_v))
    y = naive_attention(q, k, v, mask[:, None]).transpose(1, 2).reshape(2, 11, 16)
    return close(mod.subject.forward(m, x, mask), m.to_out(y))


def p04(mod):
    m = made(mod)
    x, memory = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    ref = torch.nn.MultiheadAttention(16, 4, batch_first=True).double()
    ref.load_state_dict({k: v.clone() for k, v in m.state_dict().items()})
    return close(m(x, memory, mask), ref(x, memory, memory, key_padding_mask=~mask)[0])


def p05(mod):
    m = mod.subject.build(sizes())
    for length in (5, 13, 31):
        got = mod.subject.forward(m, length)
        for t in range(length):
            for i in range(8):
                angle = t / 10000 ** (2 * i / 16)
                if abs(got[t, 2 * i] - math.sin(angle)) > 1e-5 or abs(got[t, 2 * i + 1] - math.cos(angle)) > 1e-5:
                    return False
    return True


def p06(mod):
    m = mod.subject.build(sizes(d_model=24))
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    at = torch.tensor([0, 3, 4, 9, 17])
    z = torch.view_as_complex(x.reshape(2, 4, 5, 3, 2))
    angle = at[:, None] / 10000 ** (torch.arange(3, dtype=torch.float64) / 3)
    want = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return close(mod.subject.forward(m, x, at), want)


def p07(mod):
    m = mod.subject.build(sizes())
    table = m.relative_attention_bias.weight
    got = mod.subject.forward(m, 45, 45)
    for t in range(45):
        for s in range(45):
            n = abs(s - t)  # 16 buckets, 32: 8 a side, 4 of them exact, the others log-spaced from 4 to 32
            bucket = n if n < 4 else min(7, sum(n >= 4 * 8 ** (k / 4) - 1e-9 for k in range(1, 5)) + 4)
            if not close(got[:, t, s], table[bucket + (8 if s > t else 0)]):
                return False
    return True


def p08(mod):
    ok = True
    for d in (8, 12, 15):
        m = made(mod, d_model=d, num_heads=1)
        x = torch.randn(2, 3, d, dtype=torch.float64) + 1
        ok = ok and close(m(x), F.layer_norm(x, (d,), m.weight, m.bias, m.eps))
    return ok


def p09(mod):
    m = made(mod)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    want = torch.zeros_like(x)
    for b in range(2):
        for t in range(6):
            p = m.gate(x[b, t]).softmax(0)
            top = sorted(range(4), key=lambda e: -p[e].item())[:2]
            for e in top:
                want[b, t] += p[e] / sum(p[i] for i in top) * (F.silu(x[b, t] @ m.w_in[e]) @ m.w_out[e])
    return close(mod.subject.forward(m, x), want)


def p10(mod):
    m = made(mod, dropout=0.5).train()
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    u, w = torch.randn_like(x), torch.randn(2, 5, 16, dtype=torch.float64)

    def f(x):
        torch.manual_seed(3)
        return (mod.subject.forward(m, x) * w).sum()

    (grad,) = torch.autograd.grad(f(x), x)
    with torch.no_grad():
        quotient = (f(x + 1e-6 * u) - f(x - 1e-6 * u)) / 2e-6
    return close((grad * u).sum(), quotient, 1e-5)


def p11(mod):
    m = made(mod)
    tokens = torch.randint(0, 29, (3, 8))
    lengths = [5, 8, 3]
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    got = mod.subject.forward(m, tokens, mask)
    for b, n in enumerate(lengths):  # each for itself, written out
        x = m.tok(tokens[b, :n]) + m.pos.weight[:n]
        for layer in m.layers:
            q, k, v = (t.view(n, 4, 4).transpose(0, 1) for t in layer.attn.Wqkv(layer.attn_norm(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).reshape(n, 16)
            x = x + layer.attn.Wo(y)
            x = x + layer.Wout(F.gelu(layer.Wi(layer.mlp_norm(x))))
        if not close(got[b, :n], m.final_norm(x)):
            return False
    return True


def p12(mod):
    m = made(mod)
    t = torch.randint(0, 29, (3, 13))
    first, rest = t[:, :6], [t[:, 6:7], t[:, 7:10], t[:, 10:]]
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 2, 2]):
        order = torch.tensor(order)
        got = mod.subject.cache(m, [first, *rest], reorder=order)
        whole = m(torch.cat([first[order], t[:, 6:]], 1))
        if not (close(got[:, :6], m(first)) and close(got[:, 6:], whole[:, 6:])):
            return False
    return close(mod.subject.cache(m, [first, *rest]), m(t))


def p13(mod):
    m = made(mod, vocab_size=7)
    torch.manual_seed(1)
    n = 4000
    ok = True
    for temperature in (1.0, 0.5, 2.0):
        tokens, given = mod.subject.sampling(m, torch.tensor([[1, 2, 3]]).expand(n, -1), 1, temperature=temperature)
        p = (m(torch.tensor([[1, 2, 3]]))[0, -1] / temperature).softmax(-1)
        ok = ok and close(given[0, 0], p)
        share = tokens[:, -1].bincount(minlength=7) / n
        z = (share - p).abs() / (p * (1 - p) / n).sqrt().clamp(min=1e-3)
        ok = ok and bool(z.max() < 5)
    return ok


def p14(mod):
    m = made(mod)
    t = torch.randint(0, 29, (2, 15))
    i = torch.arange(15)
    gap = i[:, None] - i[None]
    bias = -gap * torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)[:, None, None]
    bias = bias.masked_fill((gap < 0) | (gap >= 4), -torch.inf)
    x = m.embed(t)
    for l in m.layers:
        h = l.n1(x)
        q, k, v = (p(h).view(2, 15, 4, 4).transpose(1, 2) for p in (l.q, l.k, l.v))
        x = x + l.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(2, 15, 16))
        x = x + l.down(F.relu(l.up(l.n2(x))))
    whole = m.head(m.norm(x))
    ok = close(mod.subject.forward(m, t), whole)
    for parts in ([1] * 15, [15], [4, 1, 3, 2, 5], [2, 3, 6, 4]):
        ok = ok and close(mod.subject.cache(m, list(t.split(parts, 1))), whole)
    return ok


def p15(mod):
    m = made(mod)
    src, tgt = torch.randint(0, 29, (3, 7)), torch.randint(0, 29, (3, 5))
    a, b = [4, 7, 2], [5, 3, 4]
    masks = [torch.arange(n)[None] < torch.tensor(ls)[:, None] for n, ls in ((7, a), (5, b))]
    got = mod.subject.forward(m, src, tgt, *masks)
    return all(  # without its padding, alone: the same
        close(got[i, : b[i]], mod.subject.forward(m, src[i : i + 1, : a[i]], tgt[i : i + 1, : b[i]])[0])
        for i in range(3)
    )


def p16(mod):
    m = made(mod)
    tokens = torch.randint(0, 29, (3, 7))
    lengths = [2, 7, 3]
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    got = mod.subject.forward(m, tokens, mask)
    return all(close(got[i], mod.subject.forward(m, tokens[i : i + 1, :n])[0]) for i, n in enumerate(lengths))


def p17(mod):
    logits = torch.randn(2, 5, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    keep = labels != -100
    want = F.cross_entropy(logits[keep], labels[keep]) + mod.Z * logits[keep].logsumexp(-1).square().mean()
    got = mod.subject.forward(None, logits, labels)
    g, w = (torch.autograd.grad(loss, logits)[0] for loss in (got, want))
    return close(got, want, 1e-10) and close(g, w, 1e-9)


def p18(mod):
    m = mod.subject.build(sizes(vocab_size=1000))
    tokens = torch.randint(3, 1000, (200, 500))
    inputs, labels = mod.subject.forward(m, tokens, 7)
    chosen = labels != -100
    if not torch.equal(inputs[~chosen], tokens[~chosen]) or not torch.equal(labels[chosen], tokens[chosen]):
        return False
    n = chosen.sum().item()
    hidden, kept = (inputs[chosen] == 1).sum().item() / n, (inputs == tokens)[chosen].sum().item() / n
    return abs(n / tokens.numel() - 0.15) < 0.01 and abs(hidden - 0.8) < 0.02 and abs(kept - 0.1) < 0.02


def p19(mod):
    m = mod.subject.build(sizes())

    def naive(symbols):
        symbols = list(symbols)
        for a, b in m.merges:
            i = 0
            while i < len(symbols) - 1:
                if symbols[i] == a and symbols[i + 1] == b:
                    symbols[i : i + 2] = [a + b]
                i += 1
        return symbols

    for text in (mod.CORPUS, "then other transformers slowest nationals, the softmax of attention and weightlessness é"):
        ids = mod.subject.forward(m, text)
        if mod.subject.decode(m, ids) != text:
            return False
        if ids != [m.vocab[s] for w in mod.subject.words(m, text) for s in naive(w)]:
            return False
    return True


def p20(mod):
    ok = True
    for dim in (0, 1, -1):
        x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
        w = torch.randn_like(x)
        got, want = mod.subject.forward(None, x, dim=dim), x.softmax(dim)
        g, h = (torch.autograd.grad((y * w).sum(), x)[0] for y in (got, want))
        ok = ok and close(got, want) and close(g, h)
    return ok


if __name__ == "__main__":
    for n in range(1, 21):
        name = f"{n:02d}"
        torch.manual_seed(n)
        right = globals()[f"p{name}"](load(name, "right"))
        torch.manual_seed(n)
        wrong = globals()[f"p{name}"](load(name, "wrong"))
        print(name, "ok" if right and not wrong else f"NOT ok: right {right}, wrong {wrong}", flush=True)
