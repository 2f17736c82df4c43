"""For every pair: the right file agrees with an independent reference, the wrong one does not."""

import importlib.util
import math
import os
import pathlib
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch import nn

torch.set_num_threads(1)
HERE = pathlib.Path(__file__).parent
inf = float("inf")


def load(n, side):
    spec = importlib.util.spec_from_file_location(f"p{n:02d}_{side}", HERE / f"{n:02d}_{side}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(n):
    return load(n, "right"), load(n, "wrong")


def C(**kw):
    base = dict(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=3, d_ff=20, vocab_size=11, max_len=16,
                num_classes=3, dropout=0.0)
    base.update(kw)
    base["d_head"] = base["d_model"] // base["num_heads"]
    return SimpleNamespace(**base)


def rand(*shape, seed=0, dtype=torch.float64, grad=False):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_(grad)


def err(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a - b).abs().max().item()


def say(n, what, right, wrong, tol=1e-9, gap=1e-4):
    assert right <= tol, (n, "right", right)
    assert wrong > gap or math.isnan(wrong), (n, "wrong", wrong)
    print(f"{n:02d} {what}: right {right:.1e}, wrong {wrong:.1e}")


def attend(q, k, v, allowed=None, bias=None, cap=None, scale=None, empty="zeros"):
    """Loop reference: row by row, only over the keys that are allowed; query head h reads kv head h // (H / G)."""
    B, H, T, K = q.shape
    G, S = k.shape[1], k.shape[2]
    rows = []
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            for t in range(T):
                keep = [s for s in range(S) if allowed is None or bool(allowed[b, t, s])]
                if not keep:
                    rows.append(v[b, g].mean(0) if empty == "mean" else 0 * v[b, g, 0])
                    continue
                z = (k[b, g, keep] * q[b, h, t]).sum(-1) * (K**-0.5 if scale is None else scale)
                if cap:
                    z = cap * torch.tanh(z / cap)
                if bias is not None:
                    z = z + bias[b, h, t, keep]
                w = torch.exp(z - z.max())
                rows.append(((w / w.sum())[:, None] * v[b, g, keep]).sum(0))
    return torch.stack(rows).reshape(B, H, T, v.shape[-1])


def causal(B, T, S, bottom=True):
    off = S - T if bottom else 0
    return torch.tensor([[[s <= t + off for s in range(S)] for t in range(T)] for _ in range(B)])


def kernel_cases(n, run_right, *, G=2, H=2, bottom=True, cap=None, forms="pairwise", sizes=((5, 5), (3, 40), (37, 20), (1, 9), (20, 37))):
    worst = 0.0
    for i, (T, S) in enumerate(sizes):
        for is_causal in (False, True):
            for masked in (False, 2, 3):
                q, k, v = rand(2, H, T, 6, seed=i), rand(2, G, S, 6, seed=i + 50), rand(2, G, S, 5, seed=i + 90)
                allowed, mask = torch.ones(2, T, S, dtype=torch.bool), None
                if masked:
                    if forms == "padding":
                        mask = torch.rand(2, S, generator=torch.Generator().manual_seed(i)) > 0.4
                        allowed = mask[:, None].expand(2, T, S)
                    else:
                        mask = torch.rand(2, T, S, generator=torch.Generator().manual_seed(i)) > 0.4
                        mask[0, 0] = False
                        mask = mask if masked == 3 else mask[0]
                        allowed = mask.expand(2, T, S)
                if is_causal:
                    allowed = allowed & causal(2, T, S, bottom)
                worst = max(worst, err(run_right(None, q, k, v, mask, is_causal), attend(q, k, v, allowed, cap=cap)))
    return worst


def grads(f, *tensors):
    out = f(*tensors)
    g = rand(*out.shape, seed=7)
    return torch.autograd.grad(out, tensors, g)


def build(module, c, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = module.subject.build(c).to(dtype)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dim() == 1 and p.abs().max() == 0:
                p.copy_(rand(*p.shape, seed=i, dtype=dtype) * 0.3)
    return model


def same(a, b):
    b.load_state_dict(a.state_dict())
    return b


def heads(x, w, bias, h):
    y = x @ w.T + (0 if bias is None else bias)
    return y.view(x.shape[0], x.shape[1], h, -1).transpose(1, 2)


def merge(y):
    return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)


def lin(x, layer):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def pads(B, T):
    """No mask, right, left, with holes."""
    full = torch.ones(B, T, dtype=torch.bool)
    right, left, holes = full.clone(), full.clone(), full.clone()
    right[0, T - T // 3 - 1 :] = False
    left[0, : T // 3] = False
    holes[:, 1::3] = False
    return [None, right, left, holes]


def layer_cases(n, reference, c, lengths=(1, 2, 5, 13), **kw):
    """reference(model, x, allowed [B,T] or None) -> outputs; queries that are padding are not compared unless asked."""
    R, W = pair(n)
    right = build(R, c)
    wrong = same(right, build(W, c))
    rw, ww = 0.0, 0.0
    for train in (False, True):
        right.train(train), wrong.train(train)
        for T in lengths:
            for mask in pads(3, T):
                x = rand(3, T, c.d_model, seed=T)
                want = reference(right, x, mask)
                rw = max(rw, err(R.subject.forward(right, x, mask), want))
                ww = max(ww, err(W.subject.forward(wrong, x, mask), want))
    return R, W, right, wrong, rw, ww


def allow(B, T, mask, is_causal, window=None):
    a = torch.ones(B, T, T, dtype=torch.bool)
    for t in range(T):
        for s in range(T):
            if (is_causal and s > t) or (window and t - s >= window):
                a[:, t, s] = False
    return a if mask is None else a & mask[:, None]


# 01
R, W = pair(1)
r = kernel_cases(1, R.forward)
q, k, v = rand(1, 2, 20, 6), rand(1, 2, 60, 6, seed=1), rand(1, 2, 60, 6, seed=2)
want = attend(q, k, v, causal(1, 20, 60))
say(1, "causal, T=20 S=60", max(r, err(R.forward(None, q, k, v, None, True), want)), err(W.forward(None, q, k, v, None, True), want))
a = [t.clone().requires_grad_() for t in (q, k, v)]
g1 = grads(lambda *t: R.forward(None, *t, None, True), *a)
g2 = grads(lambda *t: attend(*t, causal(1, 20, 60)), *a)
assert max(err(x, y) for x, y in zip(g1, g2)) < 1e-9

# 02
def ref(m, x, mask):
    w, b, D = m.c_attn.weight, m.c_attn.bias, m.n_embd
    q, k, v = (heads(x, w[i * D : (i + 1) * D], b[i * D : (i + 1) * D], m.n_head) for i in range(3))
    return lin(merge(attend(q, k, v, allow(*x.shape[:2], mask, True))), m.c_proj)


R, W, right, wrong, r, w = layer_cases(2, ref, C())
assert w < 1e-9
x = rand(3, 13, 16)
r2 = w2 = 0.0
for mask in pads(3, 13):
    want = ref(right, x, mask)
    for cut in ((13,), (5, 1, 1, 6), (1, 3, 9), (1,) * 13):
        r2 = max(r2, err(R.subject.cache(right, x.split(cut, 1), mask), want))
        w2 = max(w2, err(W.subject.cache(wrong, x.split(cut, 1), mask), want))
    assert err(W.subject.cache(wrong, x.split(1, 1), mask), want) < 1e-9
say(2, "cached chunks against the whole", max(r, r2), w2)

# 03
R, W = pair(3)
r = max(kernel_cases(3, R.gqa, H=4, G=2), kernel_cases(3, R.gqa, H=6, G=1), kernel_cases(3, R.gqa, H=4, G=4))
q, k, v = rand(2, 4, 7, 6, grad=True), rand(2, 2, 9, 6, seed=1, grad=True), rand(2, 2, 9, 5, seed=2, grad=True)
mask = torch.rand(2, 7, 9, generator=torch.Generator().manual_seed(1)) > 0.3
mask[0, 2] = False
want = grads(lambda *t: attend(*t, mask & causal(2, 7, 9)), q, k, v)
e = [max(err(x, y) for x, y in zip(grads(lambda *t: M.gqa(None, *t, mask, True), q, k, v), want)) for M in (R, W)]
say(3, "gradients of grouped keys and values", max(r, e[0]), e[1])
assert torch.autograd.gradcheck(lambda *t: R.gqa(None, *t, mask, True), (q, k, v))

# 04, 18
def rotate_pairs(x, pos, layout, base=10000.0):
    out, K = torch.empty_like(x), x.shape[-1]
    for t, p in enumerate(pos.tolist()):
        for i in range(K // 2):
            a, b = (i, i + K // 2) if layout == "halves" else (2 * i, 2 * i + 1)
            th = p * base ** (-2 * i / K)
            out[:, :, t, a] = x[:, :, t, a] * math.cos(th) - x[:, :, t, b] * math.sin(th)
            out[:, :, t, b] = x[:, :, t, a] * math.sin(th) + x[:, :, t, b] * math.cos(th)
    return out


R, W = pair(4)
x, pos = rand(2, 3, 7, 8), torch.tensor([0, 1, 2, 5, 9, 100, 3])
m = R.subject.build(C(d_model=32, num_heads=4))
want = rotate_pairs(x, pos, "halves")
say(4, "rotation of halves", err(R.forward(m, x, pos), want), err(W.forward(W.subject.build(C(d_model=32, num_heads=4)), x, pos), want))

# 05
R, W = pair(5)
r = w = 0.0
for dim in (-1, 1, 0):
    x = rand(3, 4, 5) * 4
    x[0, 0, 0] = -inf
    x[:, 1] = -inf
    want = x.exp() / (1 + x.exp().sum(dim, keepdim=True))
    r, w = max(r, err(R.softmax_one(x, dim), want)), max(w, err(W.softmax_one(x, dim), want))
assert torch.isfinite(R.softmax_one(torch.tensor([1e4, -1e4]))).all()
say(5, "exp(x) / (1 + sum exp(x))", r, w)

# 06
def t5_bucket(d):  # published: mesh tensorflow, bidirectional, 32 buckets, distance 128
    n = -d
    ret, nb = 0, 16
    if n < 0:
        ret, n = 16, -n
    if n < 8:
        return ret + n
    return ret + min(15, 8 + int(math.log(n / 8) / math.log(128 / 8) * 8 + 1e-9))


R, W = pair(6)
a = build(R, C())
b = same(a, build(W, C()))
r = w = 0.0
for T, S in ((1, 1), (6, 9), (200, 170), (3, 40)):
    want = torch.stack([torch.stack([a.relative_attention_bias.weight[t5_bucket(s - t)] for s in range(S)]) for t in range(T)]).permute(2, 0, 1)
    r, w = max(r, err(a(T, S), want)), max(w, err(b(T, S), want))
say(6, "T5 buckets", r, w)

# 07
R, W = pair(7)
r = kernel_cases(7, R.attention)
q, k, v = rand(2, 3, 9, 6), rand(2, 3, 70, 6, seed=1), rand(2, 3, 70, 5, seed=2)
r2 = w2 = 0.0
for shape in ((9, 70), (2, 9, 70), (2, 3, 9, 70)):
    bias = rand(*shape, seed=3)
    bias[..., 5] = -inf
    full = (bias if bias.dim() == 4 else bias[:, None] if bias.dim() == 3 else bias).expand(2, 3, 9, 70)
    for is_causal in (False, True):
        want = attend(q, k, v, causal(2, 9, 70) if is_causal else None, bias=full)
        r2 = max(r2, err(R.attention(None, q, k, v, bias, is_causal), want))
        w2 = max(w2, err(W.attention(None, q, k, v, bias, is_causal), want))
say(7, "additive bias", max(r, r2), w2)
a = [t.clone().requires_grad_() for t in (q, k, v, rand(9, 70, seed=3))]
g1 = grads(lambda q, k, v, z: R.attention(None, q, k, v, z), *a)
g2 = grads(lambda q, k, v, z: attend(q, k, v, None, bias=z.expand(2, 3, 9, 70)), *a)
assert max(err(x, y) for x, y in zip(g1, g2)) < 1e-9

# 08
def slopes(n):  # the function printed with the paper
    def power2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power2(n)
    c = 2 ** math.floor(math.log2(n))
    return power2(c) + slopes(2 * c)[0::2][: n - c]


def ref(m, x, mask):
    B, T, D = x.shape
    H = m.num_heads
    w = m.query_key_value.weight.view(H, 3, D // H, D)
    b = m.query_key_value.bias.view(H, 3, D // H)
    q, k, v = (heads(x, w[:, i].reshape(D, D), b[:, i].reshape(D), H) for i in range(3))
    bias = torch.tensor([[[-s * (i - j) for j in range(T)] for i in range(T)] for s in slopes(H)], dtype=x.dtype)
    return lin(merge(attend(q, k, v, allow(B, T, mask, True), bias=bias.expand(B, H, T, T))), m.dense)


r = 0.0
for H in (1, 2, 3, 4, 12):
    r = max(r, layer_cases(8, ref, C(d_model=12, num_heads=H), lengths=(1, 6))[4])
*_, r2, w2 = layer_cases(8, ref, C(d_model=24, num_heads=6))
say(8, "ALiBi, 6 heads", max(r, r2), w2)

# 09
R, W = pair(9)
r = w = 0.0
for d in (8, 7, 2, 12):
    want = torch.tensor([[(math.sin if i % 2 == 0 else math.cos)(p / 10000 ** ((i - i % 2) / d)) for i in range(d)] for p in range(30)], dtype=torch.float64)
    r = max(r, err(R.subject.build(C(d_model=d, num_heads=1)).double()(30), want))
    w = max(w, err(W.subject.build(C(d_model=d, num_heads=1)).double()(30), want))
say(9, "sines and cosines of the paper", r, w)

# 10
def ref(m, x, mask):
    B, T, D = x.shape
    a = m.args
    pos = torch.arange(T)
    q = rotate_pairs(heads(x, m.wq.weight, None, a.n_heads), pos, "interleaved")
    k = rotate_pairs(heads(x, m.wk.weight, None, a.n_kv_heads), pos, "interleaved")
    return lin(merge(attend(q, k, heads(x, m.wv.weight, None, a.n_kv_heads), allow(B, T, mask, True, window=4))), m.wo)


R, W, right, wrong, r, w = layer_cases(10, ref, C())
assert w < 1e-9
x = rand(3, 13, 16)
for mask in pads(3, 13):
    want = ref(right, x, mask)
    for cut in ((13,), (5, 1, 1, 6), (1, 3, 9), (2, 2, 2, 7), (1,) * 13):
        r = max(r, err(R.subject.cache(right, x.split(cut, 1), mask), want))
        w = max(w, err(W.subject.cache(wrong, x.split(cut, 1), mask), want))
    assert err(W.subject.cache(wrong, x.split(1, 1), mask), want) < 1e-9
say(10, "cached chunks against the whole", r, w)

# 11, 21
def cross(n, ref, empty, c):
    R, W = pair(n)
    a = build(R, c)
    b = same(a, build(W, c))
    r = w = 0.0
    for train in (False, True):
        a.train(train), b.train(train)
        for T, S in ((1, 1), (3, 8), (6, 2)):
            x, mem = rand(3, T, 16), rand(3, S, 16, seed=1)
            for mask in pads(3, S):
                if mask is not None and empty:
                    mask[2] = False
                want = ref(a, x, mem, mask)
                r = max(r, err(R.subject.forward(a, x, mem, mask), want))
                w = max(w, err(W.subject.forward(b, x, mem, mask), want))
                leaf = x.clone().requires_grad_()
                R.subject.forward(a, leaf, mem, mask).sum().backward()
                assert torch.isfinite(leaf.grad).all()
    return R, W, a, b, r, w


def ref(m, x, mem, mask):
    q, k, v = (heads(z, p.weight, p.bias, m.num_heads) for z, p in ((x, m.q_proj), (mem, m.k_proj), (mem, m.v_proj)))
    allowed = None if mask is None else mask[:, None].expand(-1, x.shape[1], -1)
    return lin(merge(attend(q, k, v, allowed, empty="mean")), m.out_proj)


*_, r, w = cross(11, ref, True, C())
say(11, "masked memory equals removed memory", r, w)

# 12
def ref(m, x, keep):
    B, T, D = x.shape
    w = m.to_qkv.weight
    q, k, v = (heads(x, w[i * D : (i + 1) * D], None, m.heads) for i in range(3))
    phi = lambda z: torch.where(z > 0, z + 1, z.exp())
    a = (phi(q) @ phi(k).transpose(-1, -2)) * allow(B, T, keep, True)[:, None]
    z = a.sum(-1, keepdim=True)
    return lin(merge((a @ v) / torch.where(z == 0, 1.0, z)), m.to_out)


*_, r, w = layer_cases(12, ref, C(), lengths=(1, 5, 8, 9, 16, 17, 33))
say(12, "chunks against the quadratic form", r, w)

# 13
def ref(m, x, mask):
    w, b, D = m.c_attn.weight, m.c_attn.bias, m.n_embd
    q, k, v = (heads(x, w[i * D : (i + 1) * D], b[i * D : (i + 1) * D], m.n_head) for i in range(3))
    return lin(merge(attend(q, k, v, allow(*x.shape[:2], mask, True))), m.c_proj)


R, W, _, _, r, w = layer_cases(13, ref, C())
assert max(r, w) < 1e-9
stds = []
for M in (R, W):
    torch.manual_seed(0)
    m = M.subject.build(C(d_model=256, num_layers=6))
    assert abs(m.c_attn.weight.std().item() / 0.02 - 1) < 0.02 and m.c_attn.bias.abs().max() == 0
    stds.append(m.c_proj.weight.std().item() / (0.02 / math.sqrt(12)))
say(13, "std of c_proj over 0.02/sqrt(2 n), less 1", abs(stds[0] - 1), abs(stds[1] - 1), tol=0.02, gap=1)

# 14
R, W = pair(14)
r = max(kernel_cases(14, R.forward, forms="padding"), kernel_cases(14, R.forward, H=4, G=2, forms="padding"))
res = []
for dtype in (torch.bfloat16, torch.float16):
    q, k, v = rand(1, 2, 1, 8, dtype=dtype), rand(1, 2, 4096, 8, seed=1, dtype=dtype), (rand(1, 2, 4096, 8, seed=2) + 1).to(dtype)
    want = torch.softmax(q.double() @ k.double().mT / 8**0.5, -1) @ v.double()
    eps = torch.finfo(dtype).eps
    res.append([(err(M.forward(None, q, k, v).double(), want) / want.abs().max().item() / eps) for M in (R, W)])
assert err(W.forward(None, q.double(), k.double(), v.double()), R.forward(None, q.double(), k.double(), v.double())) < 1e-12
assert r < 1e-9
say(14, "half precision, S=4096, errors in eps", max(x[0] for x in res), min(x[1] for x in res), tol=1.0, gap=4)

# 15
def ref(m, x, mask):
    q, k, v = (heads(x, p.weight, p.bias, m.num_attention_heads) for p in (m.query, m.key, m.value))
    return lin(merge(attend(q, k, v, allow(*x.shape[:2], mask, False), empty="mean")), m.output)


*_, r, w = layer_cases(15, ref, C())
say(15, "padding hides keys", r, w)

# 16
R, W = pair(16)
r = kernel_cases(16, R.attend, bottom=False, cap=15.0)
mask = torch.rand(2, 7, 9, generator=torch.Generator().manual_seed(1)) > 0.3
mask[0, 2] = False
q, k, v = rand(2, 2, 7, 6, grad=True), rand(2, 2, 9, 6, seed=1, grad=True), rand(2, 2, 9, 5, seed=2, grad=True)
want = grads(lambda q, k, v: attend(q * 3, k, v, mask & causal(2, 7, 9, False), cap=15.0), q, k, v)
e = [max(err(x, y) for x, y in zip(grads(lambda q, k, v: M.attend(None, q * 3, k, v, mask, True), q, k, v), want)) for M in (R, W)]
say(16, "gradients under the cap", max(r, e[0]), e[1])
assert torch.autograd.gradcheck(lambda *t: R.attend(None, *t, mask, True), (q, k, v))

# 17
def ref(m, x, mask):
    B, T, D = x.shape
    q, k, v = (heads(x, p.weight, p.bias, m.num_heads) for p in (m.query, m.key, m.value))
    d = q.shape[-1]
    bias = torch.zeros(B, m.num_heads, T, T, dtype=x.dtype)
    for i in range(T):
        for j in range(i + 1):
            bias[:, :, i, j] = (q[:, :, i] * m.Er[m.max_len - 1 - (i - j)]).sum(-1) / math.sqrt(d)
    return lin(merge(attend(q, k, v, allow(B, T, mask, True), bias=bias)), m.out)


R, W, right, wrong, r, w = layer_cases(17, ref, C())
x = rand(2, 9, 16)
assert err(R.subject.forward(right, x)[:, :5], R.subject.forward(right, x[:, :5])) < 1e-9
assert err(W.subject.forward(wrong, x)[:, :5], W.subject.forward(wrong, x[:, :5])) > 1e-3
x = rand(1, 128, 16)
assert err(R.subject.forward(right, x), W.subject.forward(wrong, x)) < 1e-12
say(17, "vector of a distance, whatever the length", r, w)

# 18
R, W = pair(18)
x, pos = rand(2, 3, 7, 8), torch.tensor([0, 1, 2, 500, 1001, 4095, 3])
r = err(R.rope(x, pos), rotate_pairs(x, pos, "interleaved"))
x = x.bfloat16()
want = rotate_pairs(x.double(), pos, "interleaved")
e = [err(M.rope(x, pos).double(), want) / want.abs().max().item() for M in (R, W)]
assert r < 1e-12
say(18, "bfloat16, positions to 4095", e[0], e[1], tol=2**-8, gap=0.1)

# 19
def ref(m, x, mask):
    B, T, D = x.shape
    w = m.to_qkv.weight
    q, k, v = (heads(x, w[i * D : (i + 1) * D], None, m.heads) for i in range(3))
    a = torch.tensor([[(t + 2) // 4 == (s + 2) // 4 for s in range(T)] for t in range(T)]).expand(B, T, T)
    return lin(merge(attend(q, k, v, a if mask is None else a & mask[:, None])), m.to_out)


*_, r, w = layer_cases(19, ref, C(), lengths=(1, 2, 3, 4, 5, 8, 13))
say(19, "windows that begin at 2, 6, 10", r, w)

# 20
def ref(m, x, mask):
    B, T, D = x.shape
    c = m.config

    def norm(z, g):
        return z / torch.sqrt((z * z).mean(-1, keepdim=True) + 1e-6) * g

    pos = torch.arange(T)
    q = rotate_pairs(norm(heads(x, m.q_proj.weight, None, c.num_attention_heads), m.q_norm.weight), pos, "halves")
    k = rotate_pairs(norm(heads(x, m.k_proj.weight, None, c.num_key_value_heads), m.k_norm.weight), pos, "halves")
    v = heads(x, m.v_proj.weight, None, c.num_key_value_heads)
    return lin(merge(attend(q, k, v, allow(B, T, mask, True))), m.o_proj)


R, W = pair(20)
a = build(R, C())
with torch.no_grad():
    a.q_norm.weight.copy_(rand(4, seed=1) + 1), a.k_norm.weight.copy_(rand(4, seed=2) + 1)
b = same(a, build(W, C()))
r = w = 0.0
for T in (1, 2, 5, 13):
    for mask in pads(3, T):
        x = rand(3, T, 16, seed=T)
        want = ref(a, x, mask)
        r, w = max(r, err(R.subject.forward(a, x, mask), want)), max(w, err(W.subject.forward(b, x, mask), want))
fresh = build(W, C())
W.subject.forward(fresh, rand(2, 5, 16)).pow(2).sum().backward()
assert fresh.k_norm.weight.grad is None
say(20, "keys by their own gain", r, w)

# 21
def ref(m, x, mem, mask):
    D = x.shape[-1]
    q = heads(x, m.to_q.weight, None, m.heads)
    k, v = heads(mem, m.to_kv.weight[:D], None, m.heads), heads(mem, m.to_kv.weight[D:], None, m.heads)
    allowed = None if mask is None else mask[:, None].expand(-1, x.shape[1], -1)
    return lin(merge(attend(q, k, v, allowed)), m.to_out)


R, W, *_, r, w = cross(21, ref, True, C())
assert max(r, w) < 1e-9
a = build(R, C(dropout=0.5)).eval()
b = same(a, build(W, C(dropout=0.5))).eval()
x, mem = rand(3, 4, 16), rand(3, 6, 16, seed=1)
want = ref(a, x, mem, None)
say(21, "eval with dropout 0.5", err(R.subject.forward(a, x, mem), want), err(W.subject.forward(b, x, mem), want))
a.train()
assert err(R.subject.forward(a, x, mem), want) > 1e-3
mean = torch.stack([R.subject.forward(a, x, mem) for _ in range(4000)]).mean(0)
assert err(mean, want) < 0.1, err(mean, want)

# both files of a pair declare the same, and differ in few lines
for n in range(1, 22):
    assert len({tuple(sorted(map(str, M.subject.declares.items()))) for M in pair(n)}) == 1
print("all 21")
