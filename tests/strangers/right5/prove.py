"""Plain torch: every file of this folder is right. python prove.py [NN ...]"""
import copy, glob, importlib.util, math, os, sys, warnings
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
warnings.simplefilter("ignore")
HERE = os.path.dirname(os.path.abspath(__file__))


def load(path):
    spec = importlib.util.spec_from_file_location("m" + os.path.basename(path)[:-3], path)
    m = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = m
    spec.loader.exec_module(m)
    return m


def conf(d=8, h=2, g=None, n=2, ff=20, v=11, L=32, p=0.0):
    return DrawnConfig(d_model=d, num_heads=h, num_key_value_heads=g or h, num_layers=n, d_ff=ff, vocab_size=v, max_len=L,
                       num_classes=3, dropout=p)


SIZES = [conf(), conf(12, 3, n=1, v=17), conf(16, 4, 2, n=3, ff=24), conf(24, 6, 3, n=2, v=7), conf(20, 5, 1, n=2, v=31), conf(8, 4, 1, v=5), conf(8, 1)]


def close(a, b, tol=1e-9, what=""):
    assert a.shape == b.shape, (what, a.shape, b.shape)
    e = (a - b).abs().max().item() if a.numel() else 0.0
    assert e <= tol * (1 + b.abs().max().item() if b.numel() else 1), (what, e)


def fresh(s, c, noisy=True, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    m = s.build(c).to(dtype).eval()
    if noisy:
        with torch.no_grad():
            for p in m.parameters():
                p.add_(torch.randn_like(p) * 0.3)
    return m


def tok(c, B, T, seed=1):
    return torch.randint(0, c.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def lin(c, B, T, seed=1):
    return torch.randn(B, T, c.d_model, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generic(mod, s, c):
    kind, facts = s.kind, s.declares
    m, f, side = fresh(s, c), s.forward, facts.get("padding_side", "both")
    emb = kind in ("self_attention", "layer")
    make = lin if emb else tok
    causal = kind == "decoder" or facts.get("causal") is True
    pooled = kind == "classifier"
    moe = "07" in mod.__name__
    def same(a, b, what): close(a, b, 1e-8, (mod.__name__, what))
    for B, T in ((1, 1), (3, 1), (1, 2), (2, 5), (4, 9), (1, 13)):
        x = make(c, B, T)
        y = f(m, x)
        assert y.isfinite().all() and len(y) == B and y.ndim == (2 if pooled else 3), y.shape
        same(f(m, x, torch.ones(B, T, dtype=torch.bool)), y, "mask of ones")
        for b in range(B):
            same(f(m, x[b:b + 1]), y[b:b + 1], "batch")
        if causal:
            for t in range(1, T):
                same(f(m, x[:, :t]), y[:, :t], "prefix")
        for pad in (1, 3, 6):  # padding, its content random twice
            for seed in (5, 6):
                junk = make(c, B, pad, seed)
                real, no = torch.ones(B, T, dtype=torch.bool), torch.zeros(B, pad, dtype=torch.bool)
                z = f(m, torch.cat([x, junk], 1), torch.cat([real, no], 1))
                assert z.isfinite().all()
                same(z if pooled else z[:, :T], y, "right padding")
                if side == "both":
                    z = f(m, torch.cat([junk, x], 1), torch.cat([no, real], 1))
                    assert z.isfinite().all()
                    same(z if pooled else z[:, pad:], y, "left padding")
        for hide in {0, T // 2, T - 1}:
            mask = torch.ones(B, T, dtype=torch.bool)
            mask[:, hide] = False
            if T == 1: continue
            a = f(m, x, mask)
            other = x.clone()
            other[:, hide] = make(c, B, T, 77)[:, hide] if emb else (x[:, hide] + 1) % c.vocab_size
            b = f(m, other, mask)
            if pooled: same(a, b, "hidden")
            else: same(a[:, [t for t in range(T) if t != hide]], b[:, [t for t in range(T) if t != hide]], "hidden")
            if not pooled and causal and hide: same(a[:, :hide], y[:, :hide], "hidden later")
    # a sample without any real token: finite, with its gradient, and the others do not mind
    x = make(c, 2, 4)
    mask = torch.tensor([[True] * 4, [False] * 4])
    y = f(m, x, mask)
    assert y.isfinite().all()
    same(y[:1], f(m, x[:1]), "beside an empty sample")
    m.zero_grad()
    y.square().sum().backward()
    for n, p in m.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), n
    # all parameters are used (experts that were not chosen aside)
    m.zero_grad()
    with torch.enable_grad():
        f(m, make(c, 4, 9)).square().sum().backward()
    for n, p in m.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), n
        if p.grad.abs().max() == 0: UNUSED.setdefault(mod.__name__, set()).add(n)
    # influence
    T = 6
    x = make(c, 2, T)
    base = f(m, x)
    reach = torch.zeros(T, T)
    for i in range(T):
        for step in range(1, 4):
            o = x.clone()
            o[:, i] = make(c, 2, T, 90 + step)[:, i] if emb else 1 + (x[:, i] + step) % (c.vocab_size - 1)
            e = (f(m, o) - base).abs().amax((0, -1)) > 1e-10
            if pooled: reach[0, i] += bool(e)
            else: reach[:, i] += e
    seen = reach > 0
    if pooled: assert seen[0].all(), reach
    elif causal:
        want = torch.ones(T, T).tril() > 0
        assert not (seen & ~want).any()
        if not facts.get("window") and not facts.get("sparse"): assert (seen == want).all(), reach
    elif not facts.get("sparse"): assert seen.all(), reach
    # float32, copies, training
    m32 = copy.deepcopy(m).float()
    if not moe: close(f(m32, x.float() if emb else x).double(), base, 2e-3, (mod.__name__, "float32"))
    same(f(copy.deepcopy(m), x), base, "deepcopy")
    n = s.build(c).double().eval()
    n.load_state_dict(m.state_dict())
    same(f(n, x), base, "state dict")
    with torch.inference_mode(): same(f(n, x).clone(), base, "inference mode")
    same(f(n, x), base, "after inference mode")
    mb = copy.deepcopy(m).bfloat16()
    try: assert f(mb, x.bfloat16() if emb else x, torch.ones(2, T, dtype=torch.bool)).isfinite().all()
    except NotImplementedError as e: print("   no bfloat16:", str(e)[:60])
    if facts.get("beyond_max_len"):  # longer than the table: works, or says so
        try: worked = f(m, make(c, 1, c.max_len + 1)).isfinite().all()
        except (IndexError, ValueError): worked = False
        assert bool(worked) == (facts["beyond_max_len"] == "works")
    hot = fresh(s, DrawnConfig(**{**{k: getattr(c, k) for k in FIELDS}, "dropout": 0.3})).train()
    f(hot, make(c, 3, 5)).square().sum().backward()
    cold = copy.deepcopy(m).train()  # train mode without dropout is eval mode
    same(f(cold, x), base, "train mode")


FIELDS = ("d_model", "num_heads", "num_key_value_heads", "num_layers", "d_ff", "vocab_size", "max_len", "num_classes", "dropout")
UNUSED = {}


def seq2seq(mod, s, c):
    m, f, side = fresh(s, c), s.forward, s.declares.get("padding_side", "both")
    def same(a, b, what): close(a, b, 1e-8, (mod.__name__, what))
    for B, S, T in ((1, 1, 1), (2, 1, 4), (2, 5, 1), (3, 4, 6), (1, 9, 7)):
        x, y = tok(c, B, S), tok(c, B, T, 2)
        o = f(m, x, y)
        assert o.isfinite().all() and o.shape[:2] == (B, T)
        one = lambda n: torch.ones(B, n, dtype=torch.bool)
        same(f(m, x, y, one(S), one(T)), o, "ones")
        for b in range(B): same(f(m, x[b:b + 1], y[b:b + 1]), o[b:b + 1], "batch")
        for t in range(1, T): same(f(m, x, y[:, :t]), o[:, :t], "prefix")
        for pad in (1, 4):
            for seed in (5, 6):
                junk, no = tok(c, B, pad, seed), ~one(pad)
                same(f(m, torch.cat([x, junk], 1), y, torch.cat([one(S), no], 1)), o, "source right")
                same(f(m, x, torch.cat([y, junk], 1), None, torch.cat([one(T), no], 1))[:, :T], o, "target right")
                if side == "both":
                    same(f(m, torch.cat([junk, x], 1), y, torch.cat([no, one(S)], 1)), o, "source left")
                    same(f(m, x, torch.cat([junk, y], 1), None, torch.cat([no, one(T)], 1))[:, pad:], o, "target left")
    x, y = tok(c, 2, 5), tok(c, 2, 6, 2)
    base = f(m, x, y)
    for i in range(5):
        seen = 0
        for step in range(1, 4):
            z = x.clone(); z[:, i] = (z[:, i] + step) % c.vocab_size
            seen = seen + ((f(m, z, y) - base).abs().amax((0, 2)) > 1e-11).int()
        assert (seen > 0).all(), (i, seen)
    mask = torch.tensor([[True] * 5, [False] * 5])
    o = f(m, x, y, mask); assert o.isfinite().all(); same(o[:1], base[:1], "empty source beside")
    o.square().sum().backward()
    for n, p in m.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), n
    close(f(copy.deepcopy(m).float(), x, y).double(), base, 2e-3, "float32")
    assert f(copy.deepcopy(m).bfloat16(), x, y).isfinite().all()
    n = s.build(c).double().eval(); n.load_state_dict(m.state_dict()); same(f(n, x, y), base, "state")
    same(f(copy.deepcopy(m).train(), x, y), base, "train")


def naive(q, k, v, mask, causal, align, empty):
    B, H, T, K = q.shape
    G, S, E = k.shape[1], k.shape[2], v.shape[-1]
    out = q.new_zeros(B, H, T, E)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                g = h // (H // G)
                vis = [s for s in range(S) if (mask is None or mask[b, t, s]) and
                       (not causal or s <= t + (S - T if align == "bottom-right" else 0))]
                if not vis:
                    out[b, h, t] = v[b, g].mean(0) if empty == "mean" else 0
                    continue
                w = torch.softmax((k[b, g, vis] @ q[b, h, t]) / math.sqrt(K), 0)
                out[b, h, t] = w @ v[b, g, vis]
    return out


def kernel(mod, s):
    m = s.build(conf()) if s.build else None
    fact, gen = s.declares, torch.Generator().manual_seed(0)
    for B, H, G, T, S, K, E in ((1, 1, 1, 1, 1, 4, 4), (2, 4, 2, 5, 5, 4, 6), (2, 2, 2, 3, 7, 5, 3), (1, 2, 1, 7, 3, 4, 4),
                                (1, 2, 2, 37, 37, 8, 8), (1, 1, 1, 20, 50, 4, 2), (2, 2, 2, 16, 32, 4, 4)):
        if not fact.get("grouped_queries"): G = H
        q, k, v = (torch.randn(B, n, t, w, generator=gen, dtype=torch.float64, requires_grad=True) for n, t, w in ((H, T, K), (G, S, K), (G, S, E)))
        for causal in (False, True):
            pad = torch.rand(B, S, generator=gen) > 0.4
            pair = torch.rand(B, T, S, generator=gen) > 0.5
            for given, full, fn in ((None, None, s.forward), (pad, pad[:, None].expand(B, T, S), mod.undeclared.forward),
                                    (pair, pair, s.forward), (pair[0], pair[0].expand(B, T, S), s.forward)):
                a = fn(m, q, k, v, given, causal)
                b = naive(q, k, v, full, causal, fact["causal_alignment"], fact["empty_row"]) + 0 * (q.sum() + k.sum() + v.sum())
                close(a, b, 1e-11, (mod.__name__, T, S, causal))
                w = torch.randn(a.shape, generator=gen, dtype=torch.float64)
                ga, gb = (torch.autograd.grad((o * w).sum(), (q, k, v), allow_unused=True) for o in (a, b))
                for one, two in zip(ga, gb):
                    close(one, torch.zeros_like(one) if two is None else two, 1e-10, (mod.__name__, "gradient", T, S, causal))
                for dt, tol in ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)):
                    o = fn(m, *(t.detach().to(dt) for t in (q, k, v)), given, causal)
                    assert o.dtype == dt
                    close(o.double(), b.detach(), tol * 2, (mod.__name__, dt))
    big = [t * 1e3 for t in (q, k)]
    assert s.forward(m, *big, v).isfinite().all()


# ------------------------------------------------------------------ one by one


def p01(mod, s):
    c = conf(16, 4, n=1)
    m = fresh(s, c)
    b, T = m.blocks[0], 6
    ref = nn.TransformerEncoderLayer(16, 4, 20, 0.0, lambda t: F.gelu(t, approximate="tanh"), batch_first=True, norm_first=True).double()
    w = b.c_attn.weight.t().reshape(4, 3, 4, 16).transpose(0, 1).reshape(48, 16)
    bias = b.c_attn.bias.view(4, 3, 4).transpose(0, 1).reshape(48)
    ref.load_state_dict({"self_attn.in_proj_weight": w, "self_attn.in_proj_bias": bias, "self_attn.out_proj.weight": b.c_proj.weight.t(),
                         "self_attn.out_proj.bias": b.c_proj.bias, "linear1.weight": b.c_fc.weight.t(), "linear1.bias": b.c_fc.bias,
                         "linear2.weight": b.c_out.weight.t(), "linear2.bias": b.c_out.bias, "norm1.weight": b.ln_1.weight,
                         "norm1.bias": b.ln_1.bias, "norm2.weight": b.ln_2.weight, "norm2.bias": b.ln_2.bias})
    x = tok(c, 3, T)
    e = m.wte(x) + m.wpe(torch.arange(T))
    want = m.ln_f(ref(e, src_mask=torch.ones(T, T).triu(1).bool())) @ m.wte.weight.T
    close(s.forward(m, x), want)
    g1 = torch.autograd.grad(m(x).square().sum(), b.c_attn.weight)[0]
    g2 = torch.autograd.grad(m.train()(x).square().sum(), b.c_attn.weight)[0]
    close(g1, g2)


def p04(mod, s):
    assert mod.slopes(8) == [2.0 ** -i for i in range(1, 9)]
    s3 = mod.slopes(3)
    close(torch.tensor(s3), torch.tensor([2.0 ** -4, 2.0 ** -8, 2.0 ** -2]), 1e-7)
    c = conf(16, 4, n=1)
    m = fresh(s, c); b = m.h[0]; x = tok(c, 2, 6); T = 6
    h0 = m.word_embeddings_layernorm(m.word_embeddings(x))
    q, k, v = b.query_key_value(b.input_layernorm(h0)).view(2, T, 4, 3, 4).permute(3, 0, 2, 1, 4)
    i = torch.arange(T)
    sc = q @ k.mT / 2 - torch.tensor(mod.slopes(4)).double()[:, None, None] * (i[:, None] - i)
    y = (sc.masked_fill(i[None] > i[:, None], -math.inf).softmax(-1) @ v).transpose(1, 2).reshape(2, T, 16)
    z = h0 + b.dense(y)
    z = z + b.down(F.gelu(b.up(b.post_attention_layernorm(z)), approximate="tanh"))
    close(s.forward(m, x), m.ln_f(z) @ m.word_embeddings.weight.T, 1e-6)


def p05(mod, s):
    c = conf(16, 4, 2, n=1)
    m = fresh(s, c); x = tok(c, 2, 5)
    with torch.no_grad(): m.block[0]["attn"].sinks.fill_(-1e9)
    a = m.block[0]["attn"]; e = m.embedding(x); n = a.norm(e)
    q, k, v = a.qkv(n).split([16, 8, 8], -1)
    i = torch.arange(5).double()[:, None] * mod.BASE ** (-torch.arange(0, 4, 2).double() / 4)
    def rot(t): return torch.cat([t[..., :2] * i.cos() - t[..., 2:] * i.sin(), t[..., 2:] * i.cos() + t[..., :2] * i.sin()], -1)
    q, k, v = rot(q.view(2, 5, 4, 4).transpose(1, 2)), rot(k.view(2, 5, 2, 4).transpose(1, 2)), v.view(2, 5, 2, 4).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(2, 5, 16)
    z = m.block[0]["mlp"](e + a.out(y))
    close(s.forward(m, x), m.unembedding(m.norm(z)), 1e-9)


def p06(mod, s):
    for c in SIZES[:3]:
        m = fresh(s, c); x = tok(c, 3, 12); whole = m(x)
        for cut in ([12], [1] * 12, [5, 1, 1, 3, 2], [2, 7, 3], [1, 4, 7]):
            close(s.cache(m, list(x.split(cut, 1))), whole, 1e-9, cut)
            mask = torch.ones(3, 12, dtype=torch.bool); mask[0, :2] = False; mask[1, :1] = False
            full = m(x, mask); part = s.cache(m, list(x.split(cut, 1)), mask)
            close(part[mask], full[mask], 1e-9)
            if len(cut) > 1:
                order = torch.tensor([2, 0, 0]); n = cut[0]
                got = s.cache(m, list(x.split(cut, 1)), None, order)
                want = m(torch.cat([x[order, :n], x[:, n:]], 1))
                close(got[:, n:], want[:, n:], 1e-9); close(got[:, :n], whole[:, :n], 1e-9)
                ms = torch.cat([mask[order, :n], mask[:, n:]], 1)
                got = s.cache(m, list(x.split(cut, 1)), mask, order)
                want = m(torch.cat([x[order, :n], x[:, n:]], 1), ms)
                close(got[:, n:][ms[:, n:]], want[:, n:][ms[:, n:]], 1e-9)
        assert torch.equal(s.generate(m, x[:, :4], 9, True), s.generate(m, x[:, :4], 9, False))
        one = fresh(s, conf(n=1)); x = tok(c, 1, 10) % 11; y = x.clone(); y[:, 2] = (y[:, 2] + 1) % 11
        d = (one(x) - one(y)).abs().amax((0, 2)) > 1e-12
        assert d.tolist() == [2 <= t < 2 + mod.WINDOW for t in range(10)]


def p07(mod, s):
    c = conf(); m = fresh(s, c); e = m.layers[0].moe; x = lin(c, 2, 5)
    out = torch.zeros_like(x)
    for b in range(2):
        for t in range(5):
            p = (e.gate.weight @ x[b, t]).softmax(0); top = p.argsort(descending=True)[:2]
            for i in top:
                u = x[b, t] @ e.w_in[i]; out[b, t] += p[i] / p[top].sum() * (F.silu(u[:20]) * u[20:]) @ e.w_out[i]
            u = e.shared_in(x[b, t]); out[b, t] += torch.sigmoid(e.shared_gate(x[b, t])) * e.shared_out(F.silu(u[:20]) * u[20:])
    close(e(x), out)


def p09(mod, s):
    m = fresh(s, conf(), noisy=False); x = tok(conf(), 2, 5); y = x.clone(); y[:, 0] = (y[:, 0] + 1) % 11
    close(m(x)[:, 1:], m(y)[:, 1:])  # as designed: the fresh model is a bigram model
    m(x).square().sum().backward()
    assert m.blocks[0].o.weight.grad.abs().max() > 0  # and it leaves that state by the first step


def p10(mod, s):
    c = conf(); m = fresh(s, c)
    x = torch.tensor([[3, 4, 0, 5, 6, 7, 0, 0, 8, 9]]); y = m(x); a = 0
    for end in (3, 7, 8, 10):
        close(m(x[:, a:end]), y[:, a:end], 1e-9); a = end
    junk = torch.tensor([[0, 5, 0]]); mask = torch.tensor([[False] * 3 + [True] * 10])
    close(m(torch.cat([junk, x], 1), mask)[:, 3:], y, 1e-9)
    z = torch.cat([x[:, :3], junk, x[:, 3:]], 1)  # padding between documents
    mask = torch.tensor([[True] * 3 + [False] * 3 + [True] * 7])
    close(m(z, mask)[mask], y[0], 1e-9)


def p11(mod, s):
    c = conf(v=13); m = fresh(s, c); y = m(tok(c, 2, 5))
    close(y.exp().sum(-1), torch.ones(2, 5, dtype=torch.float64), 1e-9)
    long = m(tok(c, 1, 40)); close(m(tok(c, 1, 40)[:, :7]), long[:, :7], 1e-9)


def p12(mod, s):
    c = conf(); m = fresh(s, c); x = tok(c, 7, 11); mask = torch.rand(7, 11) > 0.3
    a = m(x, mask); old = mod.ROWS, mod.QUERIES
    mod.ROWS, mod.QUERIES = 100, 100
    close(m(x, mask)[mask], a[mask]); mod.ROWS, mod.QUERIES = old


def p15(mod, s):
    c = conf(); m = fresh(s, c); conv = m.pos_conv_embed.conv
    x = lin(c, 2, 6); g, v = conv.parametrizations.weight.original0, conv.parametrizations.weight.original1
    w = g * v / v.norm(dim=(0, 1), keepdim=True)
    close(m.pos_conv_embed(x), F.gelu(F.conv1d(x.mT, w, conv.bias, padding=2, groups=2)).mT)


def p16(mod, s):
    c = conf(); m = fresh(s, c); l = m.layers[0]; x = lin(c, 1, 5); T, K, S = 5, 4, mod.SPAN
    rel = m.relative_norm(m.relative.weight); at = torch.arange(T)
    near = (at[:, None] - at + S).clamp(0, 2 * S - 1)
    sc = torch.zeros(2, T, T, dtype=torch.float64)
    q, k, v, pk, pq = l.q(x)[0], l.k(x)[0], l.v(x)[0], l.pos_k(rel), l.pos_q(rel)
    for h in range(2):
        z = slice(h * K, h * K + K)
        for i in range(T):
            for j in range(T):
                sc[h, i, j] = (q[i, z] @ k[j, z] + q[i, z] @ pk[near[i, j], z] + k[j, z] @ pq[near[j, i], z]) / math.sqrt(3 * K)
    y = torch.cat([sc[h].softmax(-1) @ v[:, h * K:h * K + K] for h in range(2)], -1)
    w = l.n1(x[0] + l.o(y)); w = l.n2(w + l.down(F.gelu(l.up(w))))
    close(l(x, rel, near, torch.ones(1, 1, T, T).bool())[0], w)


def p18(mod, s):
    c = conf(16, 4, n=1); m = fresh(s, c); l = m.layers[0].local
    for T in (1, 3, 4, 5, 8, 14):
        x = lin(c, 2, T) if False else torch.randn(2, T, 16, dtype=torch.float64); real = torch.ones(2, T).bool(); real[1, T // 2 + 1:] = False
        q, k, v = l.qkv(x).view(2, T, 3, 4, 4).permute(2, 0, 3, 1, 4)
        at = torch.arange(T); blk = at // 4
        ok = ((blk[:, None] - blk).abs() <= 1) | (at[None] == 0)
        ok = ok[None, None] & real[:, None, None]
        sc = (q @ k.mT) / 2
        g = (l.q_global(x[:, 0]).view(2, 4, 1, 4) @ k.mT) / 2
        y = sc.masked_fill(~ok, -1e300).softmax(-1) @ v
        y0 = g.masked_fill(~real[:, None, None], -1e300).softmax(-1) @ v
        y = l.out(torch.cat([y0, y[:, :, 1:]], 2).transpose(1, 2).reshape(2, T, 16))
        close(l(x, real)[real], y[real], 1e-9, T)


def p21(mod, s):
    c = conf(16, 4, n=1); m = fresh(s, c); x, y = tok(c, 2, 5), tok(c, 2, 6, 3)
    one = lambda t: torch.ones_like(t).bool()
    e, d = nn.TransformerEncoderLayer(16, 4, 20, 0.0, batch_first=True).double(), nn.TransformerDecoderLayer(16, 4, 20, 0.0, batch_first=True).double()
    a = m.encoder[0]
    e.load_state_dict({"self_attn.in_proj_weight": a.qkv.weight[..., 0], "self_attn.in_proj_bias": a.qkv.bias, "self_attn.out_proj.weight": a.o.weight[..., 0],
                       "self_attn.out_proj.bias": a.o.bias, "linear1.weight": a.up.weight[..., 0], "linear1.bias": a.up.bias, "linear2.weight": a.down.weight[..., 0],
                       "linear2.bias": a.down.bias, **{f"norm{i}.{n}": getattr(getattr(a, f"n{i}"), n) for i in (1, 2) for n in ("weight", "bias")}})
    b = m.decoder[0]; sd = {}
    for name, t in (("self_attn", b.own), ("multihead_attn", b.cross)):
        sd |= {f"{name}.in_proj_weight": torch.cat([t.q.weight, t.k.weight, t.v.weight]), f"{name}.in_proj_bias": torch.cat([t.q.bias, t.k.bias, t.v.bias]),
               f"{name}.out_proj.weight": t.o.weight, f"{name}.out_proj.bias": t.o.bias}
    sd |= {"linear1.weight": b.up.weight, "linear1.bias": b.up.bias, "linear2.weight": b.down.weight, "linear2.bias": b.down.bias}
    sd |= {f"norm{i}.{n}": getattr(getattr(b, f"n{i}"), n) for i in (1, 2, 3) for n in ("weight", "bias")}
    d.load_state_dict(sd)
    mem = e(m.embed(x, one(x)))
    want = d(m.embed(y, one(y)), mem, tgt_mask=torch.ones(6, 6).triu(1).bool()) @ m.table.weight.T
    close(s.forward(m, x, y), want, 1e-9)


def p23(mod, s):
    close(mod.slopes(8), 2.0 ** -torch.arange(1, 9).double()); close(mod.slopes(3), torch.tensor([2.0 ** -4, 2.0 ** -8, 2.0 ** -2]).double())
    m = fresh(s, conf(), noisy=False); w = m.head.weight; close(w.norm(dim=-1), torch.ones(3).double())


def p24(mod, s):
    m = fresh(s, conf()); t = m.layers[0].q; x = lin(conf(), 1, 2)
    eye = copy.deepcopy(t); w = t.weight.detach(); q = (w / w.abs().mean()).round().clamp(-1, 1) * w.abs().mean()
    close(t(x), t.norm(x) @ q.T)


def p28(mod, s):
    c = conf(16, 4); m = fresh(s, c); x = lin(c, 2, 11); mask = torch.rand(2, 11) > 0.3; mask[:, 0] = True
    q, k, v = (f(x).view(2, 11, 4, 4).transpose(1, 2) for f in (m.q, m.k, m.v))
    w = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT * mask[:, None, None]).tril()
    close(m(x, mask), m.o(((w / w.sum(-1, keepdim=True)) @ v).transpose(1, 2).reshape(2, 11, 16)))


def p29(mod, s):
    c = conf(16, 2); m = fresh(s, c); x = lin(c, 2, 6); at = torch.arange(6).double()
    q = m.q_up(m.q_norm(m.q_down(x))).view(2, 6, 2, 8).transpose(1, 2)
    lat, kr = m.kv_down(x).split([8, 2], -1); lat = m.kv_norm(lat)
    k = torch.einsum("bsr,hnr->bhsn", lat, m.k_up); v = torch.einsum("bsr,hvr->bhsv", lat, m.v_up)
    z = torch.polar(torch.ones(6).double(), at)
    rot = lambda t: torch.view_as_real(torch.view_as_complex(t.contiguous()) * z)
    q = torch.cat([q[..., :6], rot(q[..., 6:])], -1); k = torch.cat([k, rot(kr)[:, None].expand(2, 2, 6, 2)], -1)
    close(m(x), m.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 16)))


def p31(mod, s):
    for c in SIZES:
        m = fresh(s, c)
        for B, T, S in ((1, 1, 1), (2, 3, 5), (3, 6, 2)):
            x, y = lin(c, B, T), lin(c, B, S, 4); o = s.forward(m, x, y)
            mask = torch.ones(B, S).bool(); close(s.forward(m, x, y, mask), o)
            pm = torch.randperm(S); close(s.forward(m, x, y[:, pm]), o)
            for junk in (lin(c, B, 3, 8), lin(c, B, 3, 9)):
                no = torch.zeros(B, 3).bool()
                close(s.forward(m, x, torch.cat([junk, y], 1), torch.cat([no, mask], 1)), o)
                close(s.forward(m, x, torch.cat([y, junk], 1), torch.cat([mask, no], 1)), o)
            for b in range(B): close(s.forward(m, x[b:b + 1], y[b:b + 1]), o[b:b + 1])
            none = torch.zeros(B, S).bool(); z = s.forward(m, x, y, none)
            close(z, m.to_out.bias.expand_as(z)); z.sum().backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in m.parameters())
        d, h = c.d_model, c.num_heads; K = d // h
        kv = m.to_kv.weight.view(h, 2, K, d); x, y = lin(c, 2, 3), lin(c, 2, 4, 5)
        q = m.to_q(x).view(2, 3, h, K); k, v = (torch.einsum("bsd,hkd->bshk", y, kv[:, i]) for i in (0, 1))
        w = (torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(K)).softmax(-1)
        r = torch.einsum("bhts,bshk->bthk", w, v) * torch.sigmoid(m.gate(x))[..., None]
        close(s.forward(m, x, y), m.to_out(r.flatten(2)))


def p32(mod, s):
    c = conf(16, 2); m = fresh(s, c); x = lin(c, 1, 5); K = 8
    qk = m.qk(x).view(1, 5, 2, 2, 2, K); v = m.v(x).view(1, 5, 2, K); lam = (m.lam[0] @ m.lam[1]).exp() - (m.lam[2] @ m.lam[3]).exp() + m.start
    ys = []
    for h in range(2):
        a = [(qk[0, :, 0, h, i] @ qk[0, :, 1, h, i].T / math.sqrt(K)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1) for i in (0, 1)]
        ys.append(m.subln((a[0] - lam * a[1]) @ v[0, :, h]) * (1 - m.start))
    close(m(x)[0], m.o(torch.cat(ys, -1)))


def p34(mod, s):
    for d in (1, 8, 300):
        c = conf(d, 1); m = fresh(s, c); ref = nn.RMSNorm(d, eps=1e-6).double(); ref.weight.data = 1 + m.weight.data[0]
        for scale in (1e-6, 1e-3, 1, 1e3, 1e8):
            x = (lin(c, 2, 4) * scale).requires_grad_(); a, b = s.forward(m, x), ref(x); close(a, b, 1e-12)
            w = torch.randn_like(a); close(*(torch.autograd.grad((o * w).sum(), x)[0] * scale for o in (a, b)), 1e-10)
        m = s.build(c)
        assert m(torch.full((1, 1, d), 6e4).half()).isfinite().all() and m(torch.full((1, 1, d), 1e38)).isfinite().all()
        z = torch.zeros(1, 1, d, requires_grad=True); m(z).sum().backward(); assert z.grad.isfinite().all()


def p35(mod, s):
    for c in SIZES[:3]:
        m = fresh(s, c)
        for B, T in ((1, 1), (3, 7)):
            x = lin(c, B, T); r = s.router(m, x)
            close(r.sum(-1), torch.ones(B, T).double()); assert ((r > 0).sum(-1) == 2).all()
            want = sum(r[..., e, None] * m.down[e](F.silu(m.up[e](x))) for e in range(5)) + m.down[5](F.silu(m.up[5](x)))
            close(s.forward(m, x), want)
            close(s.forward(m, x[:1]), want[:1]); s.forward(m, x).sum().backward()
        assert s.forward(s.build(c), x.float()).isfinite().all()


def p36(mod, s):
    for K in (2, 4, 10):
        c = conf(2 * K, 2); m = s.build(c); assert c.d_head == K
        for at in (torch.arange(5), torch.tensor([7, 7, 0, 4095]), torch.tensor([0, 4096, 100000]), torch.tensor([3])):
            x = torch.randn(2, 3, len(at), K, dtype=torch.float64); want = torch.empty_like(x)
            for n, p in enumerate(at.tolist()):
                for i in range(K // 2):
                    a = p * 10000.0 ** (-2 * i / K); u, w = x[..., n, 2 * i], x[..., n, 2 * i + 1]
                    want[..., n, 2 * i], want[..., n, 2 * i + 1] = u * math.cos(a) - w * math.sin(a), u * math.sin(a) + w * math.cos(a)
            close(s.forward(m, x, at), want, 1e-9); close(s.forward(m, x.float(), at).double(), want, 1e-5)
            assert s.forward(m, x.bfloat16(), at).dtype == torch.bfloat16
        m = s.build(c)
        with torch.inference_mode(): s.forward(m, x, at)
        x = x.requires_grad_(); s.forward(copy.deepcopy(m), x, at).sum().backward(); s.forward(m, x, at).sum().backward()


def p37(mod, s):
    def t5(rel):  # the published formula, in float64
        n = 16; out = (rel > 0).long() * n; rel = rel.abs()
        large = 8 + (torch.log(rel.clamp(min=1).double() / 8) / math.log(16) * 8 + 1e-12).long()
        return out + torch.where(rel < 8, rel, large.clamp(max=15))
    for h in (1, 3, 8):
        m = s.build(conf(h * 4, h)).double()
        for T, S in ((1, 1), (4, 9), (300, 300), (9, 2)):
            rel = torch.arange(S) - torch.arange(T)[:, None]; b = t5(rel)
            close(s.forward(m, T, S), m.table.flatten(1)[:, b])
            hf = torch.where(rel.abs() < 8, rel.abs(), (8 + (torch.log(rel.abs().clamp(min=1).float() / 8) / math.log(16) * 8).long()).clamp(max=15)) + (rel > 0) * 16
            assert torch.equal(hf, b)


def p38(mod, s):
    g = torch.Generator().manual_seed(0)
    for B, T, V in ((1, 1, 5), (3, 9, 11), (2, 20, 50)):
        x = torch.randn(B, T, V, generator=g, dtype=torch.float64, requires_grad=True); y = torch.randint(0, V, (B, T), generator=g)
        if T > 1: y[torch.rand(B, T, generator=g) < 0.3] = -100
        n = (y != -100); a = s.forward(None, x, y)
        b = F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1) + 1e-4 * x.logsumexp(-1)[n].square().mean()
        close(a, b, 1e-12); close(*(torch.autograd.grad(o, x)[0] for o in (a, b)), 1e-12)
        parts = [(x[i:i + 1], y[i:i + 1]) for i in range(B)]; close(s.accumulate(None, parts), a, 1e-12)
    e = s.forward(None, x, torch.full_like(y, -100)); assert e == 0; assert torch.autograd.grad(e, x)[0].abs().max() == 0
    assert s.forward(None, x.half(), y).isfinite()


def p39(mod, s):
    import random
    r = random.Random(0); t = s.build(conf()); n = len(mod.SPECIAL)
    def slow(word):
        p = [chr(b) for b in word.encode()]
        for a, b in t.pairs:
            i = 0
            while i < len(p) - 1:
                if p[i] == a and p[i + 1] == b: p[i:i + 2] = [a + b]
                i += 1
        return p
    ids = set(t.piece.values()); assert len(ids) == len(t.piece) and 256 not in ids and max(ids) == len(t.piece)
    for _ in range(3000):
        text = "".join(r.choice("abandtheslowr  \n,.öü日\U0001f600\x00\u200d'") for _ in range(r.randint(0, 40)))
        assert s.decode(t, s.forward(t, text)) == text
        assert [p for w in mod.WORD.findall(text) for p in t.cut(w)] == [p for w in mod.WORD.findall(text) for p in slow(w)]
        both = text + "<|end|>" + text
        assert s.forward(t, both) == s.forward(t, text) + [256] + s.forward(t, text) and s.decode(t, s.forward(t, both)) == both
    for _ in range(3000):
        text = "".join(chr(r.choice([r.randrange(0xD800), r.randrange(0xE000, 0x110000)])) for _ in range(20))
        assert s.decode(t, s.forward(t, text)) == text and 256 not in s.forward(t, text)


def p40(mod, s):
    m = s.build(conf())
    for step in [300, *range(0, 130), 10 ** 9]:
        u = min(1, max(0, (step - 10) / 90))
        want = 3e-4 * (1 + step * (10 / 10)) / 11 if step < 10 else 3e-5 + (3e-4 - 3e-5) * (1 + math.cos(math.pi * u)) / 2
        assert abs(s.forward(m, step) - want) < 1e-12, (step, s.forward(m, step), want)
    fresh_ = s.build(conf()); assert s.forward(fresh_, 57) == s.forward(m, 57)


def heads(t, h): return [t[:, i * (t.shape[1] // h):(i + 1) * (t.shape[1] // h)] for i in range(h)]  # [T, D] -> h times [T, K]


def attn(q, k, v, h, allowed=None, scale=None, bias=None, cap=None):
    """One sample, head by head, k and v with as many heads: the textbook."""
    out = []
    for i, (a, b, c) in enumerate(zip(heads(q, h), heads(k, h), heads(v, h))):
        sc = torch.stack([torch.stack([(x * y).sum() for y in b]) for x in a]) * (a.shape[1] ** -0.5 if scale is None else scale)
        if cap: sc = cap * torch.tanh(sc / cap)
        if bias is not None: sc = sc + bias[i]
        if allowed is not None: sc = sc.masked_fill(~allowed, -math.inf)
        out.append(sc.softmax(-1) @ c)
    return torch.cat(out, 1)


def turn(t, h, n, base=10000.0, inter=False):
    """The first n channels of each head are rotated."""
    out = t.clone(); K = t.shape[1] // h
    for p in range(t.shape[0]):
        for i in range(h):
            for j in range(n // 2):
                a, b = (i * K + 2 * j, i * K + 2 * j + 1) if inter else (i * K + j, i * K + j + n // 2)
                w = p * base ** (-2 * j / n)
                out[p, a], out[p, b] = t[p, a] * math.cos(w) - t[p, b] * math.sin(w), t[p, b] * math.cos(w) + t[p, a] * math.sin(w)
    return out


def tri(T): return torch.ones(T, T).tril().bool()
def many(t, g, h): return torch.cat([x for x in heads(t, g) for _ in range(h // g)], 1)
def rms(x, w, eps=1e-6): return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def p02(mod, s):
    c = conf(16, 4, n=1); m = fresh(s, c); x = tok(c, 1, 6); b = m.h[0]; e = m.wte(x[0]); n = b.ln(e)
    y = attn(turn(b.q(n), 4, 2, inter=True), turn(b.kk(n), 4, 2, inter=True), b.v(n), 4, tri(6))
    z = e + b.o(y) + b.down(F.gelu(b.up(n) + b.up_bias, approximate="tanh"))
    close(m(x)[0], m.head(m.ln_f(z)))


def p03(mod, s):
    c = conf(16, 4, 2, n=2); m = fresh(s, c); x = tok(c, 1, 8); z = m.embed(x[0]) * 4.0
    for i, l in enumerate(m.layers):
        N = lambda f, t: rms(t, 1 + f.weight)
        n, a = N(l.before_a, z), l.attention
        far = torch.arange(8)[:, None] - torch.arange(8); ok = (far >= 0) & (far < (4 if i % 2 else 99))
        y = attn(turn(a.q_proj(n), 4, 4), many(turn(a.k_proj(n), 2, 4), 2, 4), many(a.v_proj(n), 2, 4), 4, ok, cap=5.0)
        z = z + N(l.after_a, a.o_proj(y)); n = N(l.before_f, z)
        z = z + N(l.after_f, l.down(F.gelu(l.gate(n), approximate="tanh") * l.up(n)))
    close(m(x)[0], 30 * torch.tanh(rms(z, 1 + m.norm.weight) @ m.embed.weight.T / 30))


def p08(mod, s):
    c = conf(16, 2, n=1); m = fresh(s, c); x = tok(c, 1, 6); b = m.blocks[0]; z = m.tokens(x[0]); K = 8
    def sh(t): return torch.stack([torch.cat([t[i, :8], t[i - 1, 8:] if i else torch.zeros(8).double()]) for i in range(6)])
    def decay(t, sign):
        zeta = ((torch.arange(0, K, 2) / K + 0.4) / 1.4).double().repeat_interleave(2).repeat(2)
        return t * zeta ** (sign * torch.arange(6).double()[:, None] / 512)
    n = sh(b.a(z))
    y = attn(decay(turn(b.q(n), 2, K, inter=True), 1), decay(turn(b.k(n), 2, K, inter=True), -1), b.v(n), 2, tri(6))
    z = z + b.o(y); z = z + b.down(F.relu(b.up(sh(b.f(z)))) ** 2)
    close(m(x)[0], m.head(m.norm(z)), 1e-6)


def p13(mod, s):
    c = conf(16, 4, n=2); m = fresh(s, c); x = tok(c, 1, 7)
    def read(l, a, b):
        n, k = l.nx(a), l.ny(b); a = a + l.o(attn(l.q(n), l.k(k), l.v(k), 4)); return a + l.ff(l.nf(a))
    e = m.tokens(x[0]) + m.places.weight[:7]; z = read(m.encode, m.latents, e)
    for l in m.process: z = read(l, z, z)
    close(m(x)[0], m.norm(read(m.decode, e, z)))


def p14(mod, s):
    c = conf(16, 4, n=3); m = fresh(s, c); x = tok(c, 1, 6); l = m.layer
    z = m.map_in(m.embedding_norm(m.word(x[0]) + m.place.weight[:6]))
    for _ in range(3):
        z = l.LayerNorm(z + l.dense(attn(l.query(z), l.key(z), l.value(z), 4)))
        z = l.full_layer_layer_norm(z + l.ffn_output(F.gelu(l.ffn(z), approximate="tanh")))
    close(m(x)[0], m.head_norm(F.gelu(m.head(z))) @ m.word.weight.T + m.head_bias)


def p17(mod, s):
    c = conf(16, 4, n=2); m = fresh(s, c); x = tok(c, 1, 5)
    z = torch.cat([m.registers, m.embed(x[0]) + m.places[:5], m.cls])
    for b in m.blocks:
        n = b.norm1(z); q, k, v = (heads(t, 4) for t in b.qkv(n).chunk(3, -1))
        sc = torch.stack([a @ d.T / 2 for a, d in zip(q, k)])
        sc = torch.einsum("gh,hts->gts", b.before.weight, sc) + b.before.bias[:, None, None]
        w = torch.einsum("gh,hts->gts", b.after.weight, sc.softmax(-1)) + b.after.bias[:, None, None]
        z = z + b.gamma1 * b.proj(torch.cat([w[i] @ v[i] for i in range(4)], 1))
        z = z + b.gamma2 * b.fc2(F.gelu(b.fc1(b.norm2(z))))
    close(m(x).last_hidden_state[0], m.norm(z)[2:-1])


def p19(mod, s):
    c = conf(16, 4, n=2); m = fresh(s, c); x, y = tok(c, 1, 30), tok(c, 1, 26, 3)
    def buckets(T, both):
        out = torch.zeros(T, T).long()
        for i in range(T):
            for j in range(T):
                r, n, base = j - i, 8, 0
                if both: n, base, r = 4, 4 * (r > 0), abs(r)
                else: r = max(-r, 0)
                e = n // 2
                out[i, j] = base + (r if r < e else min(n - 1, e + int(math.log(r / e) / math.log(20 / e) * (n - e) + 1e-9)))
        return out
    def A(a, n, k, bias, ok): return a.o(attn(a.q(n), a.k(k), a.v(k), 4, ok, 1.0, bias))
    def stack(z, blocks, both, mem=None):
        bias = blocks[0].self_attention.relative_attention_bias.weight[buckets(len(z), both)].permute(2, 0, 1)
        for b in blocks:
            n = rms(z, b.norm_a.weight); z = z + A(b.self_attention, n, n, bias, None if both else tri(len(z)))
            if mem is not None: z = z + A(b.cross, rms(z, b.norm_x.weight), mem, None, None)
            z = z + b.wo(F.relu(b.wi(rms(z, b.norm_f.weight))))
        return z
    mem = rms(stack(m.shared(x[0]), m.encoder, True), m.encoder_norm.weight)
    close(m(x, y)[0], rms(stack(m.shared(y[0]), m.decoder, False, mem), m.decoder_norm.weight) / 4 @ m.shared.weight.T)


def p20(mod, s):
    c = conf(16, 4, n=2); m = fresh(s, c); x, y = tok(c, 1, 7), tok(c, 1, 5, 3)
    z = m.source(x).mT
    z = F.gelu(F.conv1d(F.gelu(F.conv1d(z, m.conv1.weight, m.conv1.bias, padding=1)), m.conv2.weight, m.conv2.bias, padding=1)).mT[0]
    pos = torch.zeros(7, 16).double()
    for t in range(7):
        for i in range(8): a = t * math.exp(-math.log(10000) * i / 7); pos[t, i], pos[t, i + 8] = math.sin(a), math.cos(a)
    z = z + pos
    def A(a, n, k, ok=None): return a.out(attn(a.query(n), a.key(k), a.value(k), 4, ok))
    for b in m.encoder: n = b.attn_ln(z); z = z + A(b.attn, n, n); z = z + b.mlp(b.mlp_ln(z))
    mem = m.ln_post(z); z = m.token_embedding(y[0]) + m.positional_embedding.weight[:5]
    for b in m.decoder:
        n = b.attn_ln(z); z = z + A(b.attn, n, n, tri(5)); z = z + A(b.cross_attn, b.cross_attn_ln(z), mem); z = z + b.mlp(b.mlp_ln(z))
    close(m(x, y)[0], m.ln(z) @ m.token_embedding.weight.T)


def p22(mod, s):
    c = conf(16, 4, n=2); m = fresh(s, c); x = tok(c, 1, 6); z = m.embed(x[0])
    for l in m.layers:
        n = l.n1(z); z = z + l.o(attn(turn(l.q(n), 4, 4), turn(l.k(n), 4, 4), l.v(n), 4, tri(6)))
        n = l.n2(z); z = z + l.down(F.silu(l.gate(n)) * l.up(n))
    close(m(x)[0], m.score(m.norm(z[-1])))


def p30(mod, s):
    c = conf(16, 4); m = fresh(s, c); x = lin(c, 1, 6); W = m.qkv.weight
    q, k, v = x[0] @ W[:16].T + m.q_bias, x[0] @ W[16:32].T, x[0] @ W[32:].T + m.v_bias
    unit = lambda t: torch.cat([h / h.norm(dim=1, keepdim=True) for h in heads(t, 4)], 1)
    r = (torch.arange(6) - torch.arange(6)[:, None]).double()
    bias = 16 * torch.sigmoid(m.cpb_mlp((r.sign() * torch.log2(1 + r.abs()) / 3)[..., None])).permute(2, 0, 1)
    tau = m.logit_scale.clamp(max=math.log(100)).exp().flatten()
    q = torch.cat([h * tau[i] for i, h in enumerate(heads(unit(q), 4))], 1)
    close(m(x)[0], m.proj(attn(q, unit(k), v, 4, None, 1.0, bias)))


def p33(mod, s):
    c = conf(16, 4); m = fresh(s, c); x = lin(c, 1, 6); u, q, k, v = m.in_proj(m.norm(x[0])).split([20, 16, 16, 16], -1)
    N = lambda f, t: torch.cat([F.layer_norm(h, (4,), f.weight, None, 1e-6) for h in heads(t, 4)], 1)
    y = attn(N(m.q_norm, q), N(m.k_norm, k), v, 4); keep = x.clone()
    close(m(x)[0], x[0] + m.scale * m.out(torch.cat([F.gelu(u + m.mlp_bias), y], -1))); close(x, keep)


if __name__ == "__main__":
    picked, bad = sys.argv[1:], 0
    for path in sorted(glob.glob(HERE + "/[0-9][0-9]_*.py")):
        n = os.path.basename(path)[:2]
        if picked and n not in picked: continue
        try:
            mod = load(path); s = mod.declared
            assert isinstance(mod.WHAT, str) and not mod.undeclared.declares and mod.undeclared.kind == s.kind
            for c in SIZES:
                if n == "16": c = conf(n=c.num_layers, v=c.vocab_size)
                if s.kind in ("decoder", "encoder", "classifier", "self_attention", "layer"): generic(mod, s, c)
                elif s.kind == "encoder_decoder": seq2seq(mod, s, c)
            if s.kind == "attention": kernel(mod, s)
            if "p" + n in globals(): globals()["p" + n](mod, s)
            print(n, "right", os.path.basename(path), UNUSED.get(mod.__name__, ""), flush=True)
        except Exception as e:
            bad += 1
            import traceback
            print(n, "WRONG", os.path.basename(path), repr(e)[:300], traceback.extract_tb(e.__traceback__)[-1 if not isinstance(e, AssertionError) else -2:], flush=True)
    sys.exit(bad > 0)
