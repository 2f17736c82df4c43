"""Shows for each pair, in plain torch and with none of veriformer's checks, that the right one is right and the wrong one wrong.

Each proof is a function of a subject that returns an error: how far it is from a plain, independent computation, or how much
an invariance is broken. The right one's must lie below its limit, the wrong one's far above.
"""

import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=19, max_len=32)
PROOFS = {}


def proof(number, limit=1e-9, above=1e-3):
    def keep(function):
        PROOFS[number] = (function, limit, above)
        return function

    return keep


def built(s, c=C, train=False, louder=True):
    torch.manual_seed(0)
    model = s.build(c)
    if isinstance(model, torch.nn.Module):
        model = model.double().train(train)
        if louder:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.3 * torch.randn_like(p))
    return model


def ids(*shape, seed=1):
    return torch.randint(0, C.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def apart(a, b):
    return (a - b).abs().nan_to_num(nan=1e9).max().item()


def heads(x, n):
    return x.view(x.shape[0], n, -1)


def plain_attention(q, k, v, allowed, scale, bias=None):
    """One query at a time: q [T, H, K], k and v [S, H, K], allowed(t, s)."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    for t in range(q.shape[0]):
        seen = [s for s in range(k.shape[0]) if allowed(t, s)]
        for h in range(q.shape[1]):
            scores = [scale * torch.dot(q[t, h], k[s, h]) + (0 if bias is None else bias(h, t, s)) for s in seen]
            weights = torch.exp(torch.stack(scores) - max(scores))
            out[t, h] = sum(w * v[s, h] for w, s in zip(weights / weights.sum(), seen))
    return out


@proof(1)
def _(s):  # the whole is causal; chunks through the cache must give the same
    m, x = built(s), ids(2, 9)
    whole = s.forward(m, x)
    assert apart(whole[:, :5], s.forward(m, x[:, :5])) < 1e-9
    return apart(s.cache(m, list(x.split([3, 4, 2], 1))), whole)


@proof(2)
def _(s):
    m, x = built(s), ids(2, 9)
    whole = s.forward(m, x)
    assert apart(whole[:, :5], s.forward(m, x[:, :5])) < 1e-9
    # the first layer's attention against plain loops and complex rotations: interior neighbours, groups
    layer = m.layers[0]
    h = layer.input_layernorm(m.embed_tokens(x))[0]
    a, K = layer.self_attn, C.d_model // C.num_heads
    w = 10000.0 ** (-torch.arange(0, K, 2).double() / K)

    def turned(z):
        z = torch.complex(z[..., : K // 2], z[..., K // 2 :]) * torch.polar(
            torch.ones(9, 1, K // 2).double(), (torch.arange(9).double()[:, None] * w)[:, None]
        )
        return torch.cat((z.real, z.imag), -1)

    q, k, v = turned(heads(a.q_proj(h), 4)), turned(heads(a.k_proj(h), 2)), heads(a.v_proj(h), 2)
    order = [0, 0, 1, 1]
    out = plain_attention(q, k[:, order], v[:, order], lambda t, u: u <= t, K**-0.5)
    assert apart(a.o_proj(out.flatten(1)), a(layer.input_layernorm(m.embed_tokens(x)))[0][0]) < 1e-9
    return apart(s.cache(m, list(x.split([4, 1, 1, 3], 1))), whole)


@proof(3)
def _(s):  # a sample alone and in a batch; left padding and other content at padding
    m, x = built(s), ids(3, 7)
    mask = torch.tensor([[1] * 4 + [0] * 3, [0] * 2 + [1] * 5, [1] * 7]).bool()
    y = s.forward(m, x, mask)
    alone = [s.forward(m, x[b : b + 1, mask[b]])[0] for b in range(3)]
    error = max(apart(y[b, mask[b]], alone[b]) for b in range(3))
    return max(error, apart(y, s.forward(m, torch.where(mask, x, 0), mask)))


@proof(4)
def _(s):
    m = built(s)
    one, two, target = ids(2, 5), ids(2, 5, seed=2), ids(2, 6, seed=3)
    with_grad = s.forward(m, two, target).detach()
    with torch.no_grad():
        s.forward(m, one, target)
        y = s.forward(m, two, target)
    assert apart(s.forward(m, torch.cat((two, one), 1), target, torch.tensor([[True] * 5 + [False] * 5] * 2)), with_grad) < 1e-9
    assert apart(s.forward(m, two, target[:, :4]), with_grad[:, :4]) < 1e-9
    return apart(y, with_grad)


@proof(5)
def _(s):  # no mask equals a mask of all ones, and the last source token matters to the first target token
    m, source, target = built(s), ids(2, 6), ids(2, 6, seed=2)
    ones = torch.ones(2, 6, dtype=torch.bool)
    y = s.forward(m, source, target)
    m2 = m.decoder_layers[0].encoder_attn
    x, memory = torch.randn(1, 5, 16).double(), torch.randn(1, 7, 16).double()
    q, k, v = (heads(f(z)[0], 4) for f, z in ((m2.q_proj, x), (m2.k_proj, memory), (m2.v_proj, memory)))
    plain = m2.out_proj(plain_attention(q, k, v, lambda t, u: True, 0.5).flatten(1))
    assert apart(y[:, :3], s.forward(m, source, target[:, :3])) < 1e-9
    return max(apart(y, s.forward(m, source, target, ones)), apart(m2(x, memory)[0], plain))


def padded(x, left, right, fill=0):
    x = F.pad(x, (left, right), value=fill)
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[:, left : x.shape[1] - right] = True
    return x, mask


@proof(6)
def _(s):
    m, x = built(s), ids(2, 5)
    alone = s.forward(m, x)
    assert apart(alone, s.forward(m, *padded(x, 0, 3, 5))) < 1e-9
    assert apart(alone, s.embed(m, m.wte(x))) < 1e-9
    return apart(alone, s.forward(m, *padded(x, 3, 0, 5)))


@proof(7)
def _(s):
    m, x = built(s), ids(2, 5)
    return max(apart(s.forward(m, x), s.forward(m, *padded(x, 0, 3, f))) for f in (0, 7))


@proof(8)
def _(s):  # the first layer's attention against plain loops with the published slopes
    m, x = built(s), ids(2, 7)
    seen = []
    hook = m.h[0].self_attention.register_forward_hook(lambda _, i, o: seen.extend((i[0], o)))
    y = s.forward(m, x)
    hook.remove()
    a = m.h[0].self_attention
    fused = a.query_key_value(seen[0][0]).view(7, 4, 3, 4)
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    out = plain_attention(
        fused[:, :, 0], fused[:, :, 1], fused[:, :, 2], lambda t, u: u <= t, 0.5, lambda h, t, u: -slopes[h] * (t - u)
    )
    assert apart(y, s.forward(m, *padded(x, 3, 0, 2))[:, 3:]) < 1e-9
    return apart(a.dense(out.flatten(1)), seen[1][0])


@proof(9)
def _(s):  # what comes later must not matter
    m, x = built(s), ids(4, 10)
    other = torch.cat((x[:, :4], ids(4, 6, seed=5)), 1)
    return apart(s.forward(m, x)[:, :4], s.forward(m, other)[:, :4])


@proof(10)
def _(s):
    m, x = built(s), ids(2, 12)
    whole = s.forward(m, x)
    a = m.layers[0].attention
    h = torch.randn(1, 12, 16).double()
    q, k, v = (heads(f(h)[0], 4) for f in (a.wq, a.wk, a.wv))
    plain = a.wo(plain_attention(q, k, v, lambda t, u: t - 4 < u <= t, 0.5).flatten(1))
    assert apart(a(h, torch.arange(12))[0][0], plain) < 1e-9
    assert apart(s.cache(m, list(x.split([5] + [1] * 7, 1))), whole) < 1e-9
    return apart(s.cache(m, list(x.split([5, 3, 4], 1))), whole)


@proof(11, limit=0, above=1)
def _(s):  # the number of tokens that are not the argmax of the whole model
    m, x = built(s), ids(6, 3)
    plain = x
    for _ in range(10):
        plain = torch.cat((plain, s.forward(m, plain)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(s.generate(m, x, 10, False), plain)
    return (s.generate(m, x, 10, True) != plain).sum().item()


@proof(12)
def _(s):
    m, x = built(s), ids(2, 6)
    y = s.forward(m, x)
    left = apart(y, s.forward(m, *padded(x, 3, 0, 4))[:, 3:])
    right = apart(y, s.forward(m, *padded(x, 0, 3, 4))[:, :6])
    return max(left, right, apart(y, s.forward(m, x, torch.ones(2, 6, dtype=torch.bool))))


@proof(13)
def _(s):
    drop, none = (built(s, DrawnConfig(d_model=16, num_heads=4, dropout=p)) for p in (0.5, 0.0))
    none.load_state_dict(drop.state_dict())
    x = ids(2, 8) % 11
    assert apart(s.forward(drop.train(), x), s.forward(drop, x)) > 1e-3
    drop.eval()
    return apart(s.forward(drop, x), s.forward(none, x))


@proof(14)
def _(s):  # against the layers called one after another
    m, x = built(s), ids(2, 6)
    hidden = m.embedding_norm(m.word_embeddings(x) + m.position_embeddings.weight[:6])
    for i in range(len(m.layer)):
        hidden = m.layer[i](hidden, None)
    assert apart(s.forward(m, x), s.forward(m, *padded(x, 0, 3, 4))[:, :6]) < 1e-9
    y = s.forward(m, x)
    y.square().sum().backward()
    unused = any(p.grad is None or not p.grad.any() for p in m.layer[0].output.parameters())
    assert unused == (apart(y, hidden) > 1e-3)
    return apart(y, hidden)


@proof(15)
def _(s):
    m = built(s)
    x = torch.randn(1, 6, 16).double()
    q, k, v = (heads(f(x)[0], 4) for f in (m.q, m.k, m.v))
    bias = lambda h, t, u: 0.5 * torch.dot(q[t, h], m.relative[u - t + 31])  # noqa: E731
    seen = torch.tensor([[True, True, False, True, True, True]])
    error = apart(
        s.forward(m, x)[0], m.o(plain_attention(q, k, v, lambda t, u: True, 0.5, bias).flatten(1))
    )
    other = x.clone()
    other[:, 2] += 1
    hidden = apart(s.forward(m, x, seen)[0, [0, 1, 3, 4, 5]], s.forward(m, other, seen)[0, [0, 1, 3, 4, 5]])
    return max(error, hidden) if error < 1e-9 else min(error, hidden)


def qkv(T, S, H=2, G=2, K=8, E=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, n, d, generator=g, dtype=torch.float64) for h, n, d in ((H, T, K), (G, S, K), (G, S, E))]


def definition(q, k, v, allowed):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    weights = torch.where(allowed.any(-1, keepdim=True), torch.softmax(scores, -1), torch.zeros(()).double())
    return weights @ v


def gradients(function, inputs):
    inputs = [t.clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    w = torch.sin(torch.arange(y.numel())).view(y.shape).to(y.dtype)
    return torch.autograd.grad((y * w).sum(), inputs)


@proof(16)
def _(s):
    error = 0
    for T, S in ((5, 5), (70, 70), (130, 200), (200, 70), (1, 90), (64, 64)):
        x = qkv(T, S)
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        for causal, allowed in ((False, torch.ones_like(seen)), (True, seen)):
            error = max(error, apart(s.forward(None, *x, causal=causal), definition(*x, allowed)))
            if S >= T:
                both = zip(
                    gradients(lambda *t: s.forward(None, *t, causal=causal), x), gradients(lambda *t: definition(*t, allowed), x)
                )
                error = max(error, *(apart(a, b) for a, b in both))
    return error


@proof(17)
def _(s):
    x = qkv(7, 9)
    allowed = torch.rand(2, 7, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed[..., 0] = True

    def plain(q, k, v):
        scores = 4 * torch.tanh(3 * q @ k.mT / 8**0.5 / 4)
        return torch.softmax(scores.masked_fill(~allowed[:, None], -torch.inf), -1) @ v

    own = lambda q, k, v: s.forward(None, 3 * q, k, v, attention_mask=allowed)  # noqa: E731
    assert apart(own(*x), plain(*x)) < 1e-9
    empty = allowed.clone()
    empty[0, 3] = False
    assert s.forward(None, *x, attention_mask=empty)[0, :, 3].abs().max() == 0
    return max(apart(a, b) for a, b in zip(gradients(own, x), gradients(plain, x)))


@proof(18)
def _(s):
    error = 0
    for T, S in ((5, 7), (40, 70), (3, 200)):
        x = qkv(T, S)
        masks = torch.rand(2, T, S, generator=torch.Generator().manual_seed(0)) < 0.5
        masks[0, 1], masks[1, 2, : S // 2] = False, False
        for mask in (torch.ones(T, S, dtype=torch.bool), masks, masks[1]):
            allowed = mask[:, None] if mask.dim() == 3 else mask
            error = max(error, apart(s.forward(None, *x, attention_mask=mask), definition(*x, allowed)))
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        error = max(error, apart(s.forward(None, *x, causal=True), definition(*x, seen)))
        own, plain = (gradients(f, x) for f in (lambda *t: s.forward(None, *t, causal=True), lambda *t: definition(*t, seen)))
        error = max(error, *(apart(a, b) for a, b in zip(own, plain)))
    return error


@proof(19, limit=2e-3, above=0.5)
def _(s):  # angles of float32, under autocast to bfloat16
    m = s.build(DrawnConfig(d_model=16, num_heads=2))
    positions, K = torch.tensor([0, 1, 300, 301, 1000, 4097]), 8
    w = 10000.0 ** (-torch.arange(0, K, 2).double() / K)
    x = torch.randn(1, 1, 6, K)
    z = torch.complex(x[..., :4].double(), x[..., 4:].double())
    z = z * torch.polar(torch.ones(6, 4).double(), positions.double()[:, None] * w)
    plain = torch.cat((z.real, z.imag), -1)
    assert apart(s.forward(m, x, positions), plain) < 2e-3
    assert apart(s.forward(m, x.double(), positions), plain) < 1e-9
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return apart(s.forward(m, x, positions), plain)


@proof(20, limit=0, above=1)
def _(s):  # the number of distances in other buckets than those of Mesh TensorFlow's code, in exact arithmetic
    m = built(s)
    bias = s.forward(m, 200, 200)

    def bucket(d):
        far, d = (16 if d > 0 else 0), abs(d)
        if d < 8:
            return far + d
        # 8 + floor(8 log(d / 8) / log(16)): the largest n with (d / 8)^8 >= 16^n
        return far + min(15, 8 + max(n for n in range(40) if d**8 >= 16**n * 8**8))

    wrong = 0
    for t, u in [(0, d) for d in range(200)] + [(199, 199 - d) for d in range(200)]:
        wrong += not torch.equal(bias[:, t, u], m.relative_attention_bias.weight[bucket(u - t)])
    return wrong


@proof(21, limit=1e-6, above=1e-2)
def _(s):
    table = s.forward(s.build(C), 30)
    plain = torch.tensor(
        [[(math.sin, math.cos)[i % 2](p / 10000 ** (2 * (i // 2) / 16)) for i in range(16)] for p in range(30)]
    )
    return apart(table, plain)


@proof(22)
def _(s):
    m = built(s)
    x, memory = torch.randn(3, 4, 16).double(), torch.randn(3, 6, 16).double()
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]]).bool()
    y = s.forward(m, x, memory, mask)
    assert apart(s.forward(m, x[1:2], memory[1:2, :2]), s.forward(m, x[1:2], memory[1:2], mask[1:2])) < 1e-9
    q, k, v = (heads(f(z), 4) for f, z in ((m.to_q, x[0]), (m.to_k, memory[0]), (m.to_v, memory[0])))
    assert apart(m.to_out(plain_attention(q, k, v, lambda t, u: True, 0.5).flatten(1)), s.forward(m, x[:1], memory[:1])[0]) < 1e-9
    return max(apart(y[b : b + 1], s.forward(m, x[b : b + 1], memory[b : b + 1, mask[b]])) for b in range(3))


@proof(23)
def _(s):
    m, error = built(s), 0
    for T in (1, 3, 4, 8, 13):
        x = torch.randn(2, T, 16).double()
        q, k, v = m.qkv(x[1]).view(T, 3, 4, 4).unbind(1)
        plain = m.out(plain_attention(q, k, v, lambda t, u: t - 4 < u <= t, 0.5).flatten(1))
        error = max(error, apart(s.forward(m, x)[1], plain))
    return error


@proof(24)
def _(s):
    x = qkv(4, 5, H=4, G=2)
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[0, 1], mask[1, 2, :3] = False, False
    wide = lambda q, k, v: (q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]])  # noqa: E731
    own = lambda *t: s.forward(None, *t, attention_mask=mask)  # noqa: E731

    def plain(q, k, v):  # row by row, of what each row sees
        q, k, v = wide(q, k, v)
        rows = torch.zeros(2, 4, 4, 8, dtype=torch.float64)
        for b in range(2):
            for t in range(4):
                seen = mask[b, t]
                if seen.any():
                    w = torch.softmax((k[b][:, seen] @ q[b, :, t, :, None] / 8**0.5)[..., 0], -1)
                    rows[b, :, t] = (w[..., None] * v[b][:, seen]).sum(1)
        return rows

    assert apart(own(*x), plain(*x)) < 1e-9
    return max(apart(a, b) for a, b in zip(gradients(own, x), gradients(plain, x)))


@proof(25, limit=1e-5, above=1e-2)
def _(s):  # the gradient against a difference quotient, from one seed
    m = built(s, DrawnConfig(d_model=16, num_heads=4, dropout=0.3), train=True)
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def f(x):
        torch.manual_seed(7)
        return s.forward(m, x).sin().sum()

    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf)
    v, h = torch.randn_like(x), 1e-6
    quotient = (f(x + h * v) - f(x - h * v)) / (2 * h)
    m.eval()
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2).bool()
    assert apart(s.forward(m, x, mask)[:, :3], s.forward(m, x[:, :3])) < 1e-9
    return abs((g * v).sum() - quotient).item()


@proof(26, limit=1e-2, above=0.1)
def _(s):
    m = s.build(C).half()
    x = torch.randn(3, 4, 16) * torch.tensor([1.0, 300.0, 10000.0]).view(3, 1, 1)
    x = x.half()
    plain = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    m64 = s.build(C).double()
    assert apart(s.forward(m64, x.double()), plain) < 1e-12
    return apart(s.forward(m, x).double(), plain)


@proof(27)
def _(s):
    m, x = built(s), torch.randn(2, 5, 16).double()
    weights = s.router(m, x)
    assert apart(weights.sum(-1), torch.ones(2, 5)) < 1e-12 and (weights > 0).sum(-1).eq(2).all()
    out = torch.zeros_like(x)
    for b in range(2):
        for t in range(5):
            p = torch.softmax(m.gate.weight @ x[b, t], 0)
            best = sorted(range(4), key=lambda e: -p[e])[:2]
            for e in best:
                hidden = F.gelu(m.w1[e].weight @ x[b, t])
                out[b, t] += p[e] / (p[best[0]] + p[best[1]]) * (m.w2[e].weight @ hidden)
    return apart(s.forward(m, x), out)


@proof(28)
def _(s):
    logits, labels = torch.randn(3, 5, 11).double(), torch.randint(0, 11, (3, 5))
    labels[0, 2:], labels[2, 4] = -100, -100
    plain = F.cross_entropy(logits.view(-1, 11), labels.view(-1), label_smoothing=0.1)
    full = torch.randint(0, 11, (3, 5))
    both = F.cross_entropy(logits.view(-1, 11), full.view(-1), label_smoothing=0.1)
    assert apart(s.forward(None, logits, full), both) < 1e-9
    leaf = logits.clone().requires_grad_()
    (g,) = torch.autograd.grad(s.forward(None, leaf, labels), leaf)
    return max(apart(s.forward(None, logits, labels), plain), g[labels == -100].abs().max().item())


@proof(29, limit=0.005, above=0.05)
def _(s):  # shares of masked, replaced, left among the chosen
    m = s.build(DrawnConfig(vocab_size=1000))
    x = torch.randint(0, 1000, (256, 1024), generator=torch.Generator().manual_seed(0))
    inputs, labels = s.forward(m, x, 3)
    chosen = labels != -100
    assert torch.equal(labels[chosen], x[chosen]) and torch.equal(inputs[~chosen], x[~chosen])
    assert x[chosen].min() > 3 and abs(chosen.double().mean() - 0.15 * 0.996) < 0.003
    n = chosen.sum().item()
    masked = (chosen & (inputs == 3)).sum().item() / n
    kept = (chosen & (inputs == x)).sum().item() / n
    return max(abs(masked - 0.8), abs(1 - masked - kept - 0.1), abs(kept - 0.1))


@proof(30, limit=1e-15, above=1e-5)
def _(s):
    error = 0
    for step in range(200, 1200):
        u = min(1.0, (step - 200) / 800)
        error = max(error, abs(s.forward(None, step) - (6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * u)) / 2)))
    rising = [s.forward(None, step) for step in range(201)]
    assert rising[0] > 0 and all(a < b for a, b in zip(rising[:199], rising[1:200]))
    return error


@proof(31, limit=0, above=1)
def _(s):  # the number of texts that do not come back
    m = s.build(C)
    texts = ["", "the model", "le café", "naïve 日本語", "🙂 the 🙂", "größere", "Ωmega\n\t", "ça", "\x00é"]
    wrong = 0
    for text in texts:
        plain = list(text.encode())  # merges one after another, in the order of their ranks
        for (a, b), new in m.ranks.items():
            i = 0
            while i < len(plain) - 1:
                if plain[i : i + 2] == [a, b]:
                    plain[i : i + 2] = [new]
                i += 1
        assert s.forward(m, text) == plain
        wrong += s.decode(m, s.forward(m, text)) != text
    return wrong


def main():
    bad = 0
    for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
        number = int(path.name[:2])
        if len(sys.argv) > 1 and str(number) not in sys.argv[1:]:
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        proof_of, limit, above = PROOFS[number]
        torch.manual_seed(0)
        right = proof_of(module.right)
        torch.manual_seed(0)
        wrong = proof_of(module.wrong)
        ok = right <= limit and wrong >= above and module.right.declares == module.wrong.declares
        bad += not ok
        print(f"{'ok ' if ok else 'BAD'} {path.stem:28} right {right:.3g} (limit {limit:g})   wrong {wrong:.3g}   {module.right.kind}")
    print("all hold" if not bad else f"{bad} do not hold")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main()))
