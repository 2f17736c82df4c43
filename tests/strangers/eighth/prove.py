"""For every pair: the right one is what an independent plain computation says, the wrong one is not."""

import importlib.util
import math
import os
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = [(8, 2, 2), (16, 4, 2), (16, 4, 1), (8, 1, 1), (32, 4, 4)]


def load(name):
    spec = importlib.util.spec_from_file_location("m" + name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def config(d=8, h=2, kv=2, **more):
    base = dict(vocab_size=11, d_model=d, num_heads=h, num_key_value_heads=kv, num_layers=2, d_ff=20, max_len=24,
                num_classes=3, dropout=0.0, d_head=d // h)  # fmt: skip
    return SimpleNamespace(**{**base, **more})


def loud(model, seed=0):
    """Unit-gain weights, so that errors are seen; the same numbers for both files of a pair."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64)
            p.copy_((noise / (p.shape[-1] ** 0.5) if p.dim() > 1 else 1 + 0.3 * noise).to(p.dtype))
    return model


def make(subject, c, dtype=torch.float64, train=False):
    model = loud(subject.build(c).to(dtype))
    return model.train(train)


def tokens(B, T, seed=1, V=11):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def apart(a, b):
    return ((a - b).abs().max() / b.pow(2).mean().sqrt()).item() if a.numel() else 0.0


def masks(B, T, side):
    out = torch.ones(B, T, dtype=torch.bool)
    for b in range(B):
        n = (b * 2 + (T > 1)) % T
        if n:
            if side == "right":
                out[b, T - n :] = False
            else:
                out[b, :n] = False
    return out


# ---- plain parts, written with loops and other primitives than the files
def lin(p, x):
    y = x @ p.weight.T
    return y if p.bias is None else y + p.bias


def ln(p, x):
    m = x.mean(-1, keepdim=True)
    return (x - m) / (x.var(-1, unbiased=False, keepdim=True) + p.eps).sqrt() * p.weight + p.bias


def rms(w, eps, x):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attend(q, k, v, h, sees, scale, bias=None, kv=None):
    """One sample: q [T, D], k, v [S, Dkv]; sees(t, s) -> bool; bias(head, t, s) -> number; head by head, query by query."""
    kv = kv or h
    K = q.shape[-1] // h
    out = []
    for t in range(q.shape[0]):
        row = []
        for head in range(h):
            g = head // (h // kv)
            keys = [s for s in range(k.shape[0]) if sees(t, s)]
            kk, vv = k[keys, g * K : (g + 1) * K], v[keys, g * K : (g + 1) * K]
            s = kk @ q[t, head * K : (head + 1) * K] * scale
            if bias is not None:
                s = s + torch.stack([torch.as_tensor(bias(head, t, j), dtype=s.dtype) for j in keys])
            e = (s - s.max()).exp()
            row.append((e / e.sum()) @ vv)
        out.append(torch.cat(row))
    return torch.stack(out)


def rot(x, h, positions, layout, base=10000.0):
    """x [T, h*K] turned as complex numbers."""
    K = x.shape[-1] // h
    out = x.clone()
    for t, p in enumerate(positions):
        for head in range(h):
            for i in range(K // 2):
                a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + K // 2)
                a, b = head * K + a, head * K + b
                ang = p * base ** (-2 * i / K)
                out[t, a] = x[t, a] * math.cos(ang) - x[t, b] * math.sin(ang)
                out[t, b] = x[t, a] * math.sin(ang) + x[t, b] * math.cos(ang)
    return out


def sinus(T, d, layout):
    pe = torch.zeros(T, d, dtype=torch.float64)
    for p in range(T):
        for i in range(d // 2):
            w = 1 / 10000 ** (2 * i / d)
            a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + d // 2)
            pe[p, a], pe[p, b] = math.sin(p * w), math.cos(p * w)
    return pe


def causal(t, s):
    return s <= t


# ---- references, one sample without padding: tokens [T] -> [T, *]
def ref01(m, ids, c):
    g = m.transformer
    x = g.wte.weight[ids] + g.wpe.weight[: len(ids)]
    for b in g.h:
        q, k, v = lin(b.attn.c_attn, ln(b.ln_1, x)).chunk(3, -1)
        x = x + lin(b.attn.c_proj, attend(q, k, v, c.num_heads, causal, c.d_head**-0.5))
        x = x + lin(b.mlp.c_proj, gelu(lin(b.mlp.c_fc, ln(b.ln_2, x))))
    return ln(g.ln_f, x) @ g.wte.weight.T


def ref02(m, ids, c):
    x, pos = m.tok_embeddings.weight[ids], range(len(ids))
    for b in m.layers:
        a, y = b.attention, rms(b.attention_norm.weight, 1e-5, x)
        q = rot(lin(a.wq, y), c.num_heads, pos, "interleaved")
        k = rot(lin(a.wk, y), c.num_key_value_heads, pos, "interleaved")
        x = x + lin(a.wo, attend(q, k, lin(a.wv, y), c.num_heads, causal, c.d_head**-0.5, kv=c.num_key_value_heads))
        y = rms(b.ffn_norm.weight, 1e-5, x)
        u = lin(b.feed_forward.w1, y)
        x = x + lin(b.feed_forward.w2, u * torch.sigmoid(u) * lin(b.feed_forward.w3, y))
    return lin(m.output, rms(m.norm.weight, 1e-5, x))


def published_slopes(n):
    if n & (n - 1) == 0:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    p = 1 << (n.bit_length() - 1)
    return published_slopes(p) + [2 ** (-8 * (i + 1) / (2 * p)) for i in range(0, 2 * p, 2)][: n - p]


def ref03(m, ids, c):
    slopes, K = published_slopes(c.num_heads), c.d_head
    x = ln(m.word_embeddings_layernorm, m.word_embeddings.weight[ids])
    for b in m.h:
        f = lin(b.self_attention.query_key_value, ln(b.input_layernorm, x))
        cut = lambda i: torch.cat([f[:, (3 * h + i) * K : (3 * h + i + 1) * K] for h in range(c.num_heads)], -1)  # noqa
        y = attend(cut(0), cut(1), cut(2), c.num_heads, causal, K**-0.5, lambda h, t, s: -slopes[h] * (t - s))
        x = x + lin(b.self_attention.dense, y)
        x = x + lin(b.dense_4h_to_h, gelu_tanh(lin(b.dense_h_to_4h, ln(b.post_attention_layernorm, x))))
    return ln(m.ln_f, x) @ m.word_embeddings.weight.T


def ref04(m, ids, c):
    d = c.d_model
    x = m.embed_tokens.weight[ids] * math.sqrt(d) + sinus(len(ids), d, "halves")
    for b in m.layers:
        a = b.self_attn
        y = attend(lin(a.q_proj, x), lin(a.k_proj, x), lin(a.v_proj, x), c.num_heads, causal, c.d_head**-0.5)
        x = ln(b.self_attn_layer_norm, x + lin(a.out_proj, y))
        x = ln(b.final_layer_norm, x + lin(b.fc2, lin(b.fc1, x).clamp(min=0)))
    return x @ m.embed_tokens.weight.T


def ref05(m, ids, c):
    x, pos = m.embed_tokens.weight[ids], range(len(ids))
    for b in m.layers:
        a, y = b.self_attn, rms(b.input_layernorm.weight, 1e-6, x)
        q = rot(lin(a.q_proj, y), c.num_heads, pos, "halves")
        k = rot(lin(a.k_proj, y), c.num_key_value_heads, pos, "halves")
        sees = lambda t, s: t - 3 + 1 <= s <= t  # noqa: E731
        x = x + lin(a.o_proj, attend(q, k, lin(a.v_proj, y), c.num_heads, sees, c.d_head**-0.5, kv=c.num_key_value_heads))
        y = rms(b.post_attention_layernorm.weight, 1e-6, x)
        u = lin(b.mlp.gate_proj, y)
        x = x + lin(b.mlp.down_proj, u * torch.sigmoid(u) * lin(b.mlp.up_proj, y))
    return lin(m.lm_head, rms(m.norm.weight, 1e-6, x))


def t5_bucket(distance, n, limit):
    exact = n // 2
    if distance < exact:
        return distance
    return min(n - 1, exact + int(math.log(distance / exact) / math.log(limit / exact) * (n - exact)))


def ref06(m, src, trg, c):
    h = c.num_heads

    def stack(s, x, memory=None):
        table = s.relative_bias.embedding.weight

        def bias(head, t, j):
            if s.is_decoder:
                return table[t5_bucket(t - j, 8, 16), head]
            return table[t5_bucket(abs(t - j), 4, 16) + (4 if j > t else 0), head]

        every = lambda t, j: True  # noqa: E731
        for b in s.block:
            a, y = b.self_attention, rms(b.self_norm.weight, 1e-6, x)
            sees = causal if s.is_decoder else every
            x = x + lin(a.o, attend(lin(a.q, y), lin(a.k, y), lin(a.v, y), h, sees, 1.0, bias))
            if memory is not None:
                a, y = b.cross_attention, rms(b.cross_norm.weight, 1e-6, x)
                x = x + lin(a.o, attend(lin(a.q, y), lin(a.k, memory), lin(a.v, memory), h, every, 1.0))
            x = x + lin(b.ff.wo, lin(b.ff.wi, rms(b.ff_norm.weight, 1e-6, x)).clamp(min=0))
        return rms(s.final_layer_norm.weight, 1e-6, x)

    E = m.shared.weight
    return stack(m.decoder, E[trg], stack(m.encoder, E[src])) / math.sqrt(c.d_model) @ E.T


def ref07(m, src, trg, c):
    h, d = c.num_heads, c.d_model
    every = lambda t, j: True  # noqa: E731

    def mha(a, x, y, sees):
        return lin(a.out, attend(lin(a.q_linear, x), lin(a.k_linear, y), lin(a.v_linear, y), h, sees, c.d_head**-0.5))

    def ff(f, x):
        return lin(f.linear_2, lin(f.linear_1, x).clamp(min=0))

    x = m.src_embed.weight[src] * math.sqrt(d) + sinus(len(src), d, "interleaved")
    for b in m.encoder:
        x = ln(b.norm_1, x + mha(b.attn, x, x, every))
        x = ln(b.norm_2, x + ff(b.ff, x))
    y = m.trg_embed.weight[trg] * math.sqrt(d) + sinus(len(trg), d, "interleaved")
    for b in m.decoder:
        y = ln(b.norm_1, y + mha(b.attn_1, y, y, causal))
        y = ln(b.norm_2, y + mha(b.attn_2, y, x, every))
        y = ln(b.norm_3, y + ff(b.ff, y))
    return lin(m.out, y)


def ref08(m, ids, c):
    e = m.embeddings
    x = e.word_embeddings.weight[ids] + e.position_embeddings.weight[2 : 2 + len(ids)] + e.token_type_embeddings.weight[0]
    x = ln(e.LayerNorm, x)
    for b in m.layer:
        a = b.attention
        y = attend(lin(a.query, x), lin(a.key, x), lin(a.value, x), c.num_heads, lambda t, s: True, c.d_head**-0.5)
        x = ln(b.attention_norm, x + lin(b.attention_output, y))
        x = ln(b.output_norm, x + lin(b.output, gelu(lin(b.intermediate, x))))
    return x


def ref09(m, ids, c):
    x = m.embed.lut.weight[ids] * math.sqrt(c.d_model) + sinus(len(ids), c.d_model, "interleaved")
    for b in m.encoder.layers:
        y = ln(b.sublayer[0].norm, x)
        q, k, v = (lin(b.self_attn.linears[i], y) for i in range(3))
        x = x + lin(b.self_attn.linears[3], attend(q, k, v, c.num_heads, lambda t, s: True, c.d_head**-0.5))
        x = x + lin(b.feed_forward.w_2, lin(b.feed_forward.w_1, ln(b.sublayer[1].norm, x)).clamp(min=0))
    return ln(m.encoder.norm, x)


def ref10(m, ids, c):
    x, pos, d, h = m.table[ids], range(len(ids)), c.d_model, c.num_heads
    norm = lambda x, g, s: ln(SimpleNamespace(eps=1e-5, weight=g, bias=s), x)  # noqa: E731
    for p in m.blocks:
        y = norm(x, p["g1"], p["s1"])
        q, k, v = (y @ p["w" + n].reshape(d, d) + p["b" + n].reshape(d) for n in "qkv")
        y = attend(rot(q, h, pos, "halves"), rot(k, h, pos, "halves"), v, h, lambda t, s: True, c.d_head**-0.5)
        x = x + y @ p["wo"] + p["bo"]
        x = x + gelu(norm(x, p["g2"], p["s2"]) @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
    return norm(x, m.gain, m.shift)


def ref11(m, ids, c):
    x = m.tok.weight[ids] + m.pos.weight[: len(ids)]
    for b in m.blocks:
        q, k, v = lin(b.attn.qkv, ln(b.norm1, x)).chunk(3, -1)
        x = x + lin(b.attn.proj, attend(q, k, v, c.num_heads, lambda t, s: True, c.d_head**-0.5))
        x = x + lin(b.mlp.fc2, gelu(lin(b.mlp.fc1, ln(b.norm2, x))))
    return lin(m.head, ln(m.norm, x).mean(0))


def ref12(m, ids, c):
    x = torch.cat([m.cls_token[0], m.token_embedding.weight[ids]]) + m.position_embedding[0, : len(ids) + 1]
    for b in m.encoder:
        q, k, v = (ln(b.norm1, x) @ b.self_attn.in_proj_weight.T + b.self_attn.in_proj_bias).chunk(3, -1)
        x = x + lin(b.self_attn.out_proj, attend(q, k, v, c.num_heads, lambda t, s: True, c.d_head**-0.5))
        x = x + lin(b.linear2, gelu(lin(b.linear1, ln(b.norm2, x))))
    return lin(m.classifier, ln(m.ln_post, x[0]))


# ---- how far a subject is from its reference: the worst over sizes, lengths, padding, modes, dtypes
def forward_error(subject, ref, sides=(), pooled=False, sizes=SIZES, dtype=torch.float64):
    worst = 0.0
    for d, h, kv in sizes:
        c = config(d, h, kv)
        for train in (False, True):
            m = make(subject, c, dtype, train)
            plain = make(subject, c, torch.float64)
            plain.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in m.state_dict().items()})
            for B, T in ((1, 1), (3, 5), (2, 9)):
                ids = tokens(B, T, seed=T)
                for side in (None, *sides):
                    mask = torch.ones(B, T, dtype=torch.bool) if side is None else masks(B, T, side)
                    for grad in (True, False):
                        with torch.set_grad_enabled(grad):
                            out = subject.forward(m, ids) if side is None else subject.forward(m, ids, mask)
                        for b in range(B):
                            want = ref(plain, ids[b][mask[b]], c).detach()
                            got = out[b] if pooled else out[b][mask[b]]
                            worst = max(worst, apart(got.detach().double(), want))
    return worst


def pair_error(subject, ref, sizes=SIZES, dtype=torch.float64):
    worst = 0.0
    for d, h, kv in sizes:
        c = config(d, h, kv)
        for train in (False, True):
            m = make(subject, c, dtype, train)
            plain = make(subject, c, torch.float64)
            plain.load_state_dict({k: v.double() for k, v in m.state_dict().items()})
            for B, S, T in ((1, 1, 1), (3, 5, 4), (2, 3, 7)):
                src, trg = tokens(B, S, 5), tokens(B, T, 6)
                for side in (None, "right"):
                    sm = torch.ones(B, S, dtype=torch.bool) if side is None else masks(B, S, side)
                    tm = torch.ones(B, T, dtype=torch.bool) if side is None else masks(B, T, side)
                    out = subject.forward(m, src, trg) if side is None else subject.forward(m, src, trg, sm, tm)
                    for b in range(B):
                        want = ref(plain, src[b][sm[b]], trg[b][tm[b]], c)
                        worst = max(worst, apart(out[b][tm[b]].double(), want).__float__())
    return worst


CUTS = ([1] * 9, [4, 1, 1, 1, 2], [3, 3, 3], [9], [1, 8], [5, 4])


def cache_error(subject, mask_side=None, reorder=None, sizes=SIZES):
    worst = 0.0
    for d, h, kv in sizes:
        m = make(subject, config(d, h, kv))
        for cut in CUTS:
            ids = tokens(3, 9, seed=2)
            chunks = list(ids.split(cut, dim=1))
            more, history, real = {}, ids, torch.ones(3, 9, dtype=torch.bool)
            if mask_side:
                real = masks(3, 9, mask_side)
                more["attention_mask"] = real
            if reorder is not None and len(cut) > 1:
                more["reorder"] = torch.tensor(reorder)
                history = torch.cat([ids[reorder][:, : cut[0]], ids[:, cut[0] :]], 1)
            with torch.no_grad():
                got = subject.cache(m, chunks, **more)
                full = subject.forward(m, history, real) if mask_side else subject.forward(m, history)
            if "reorder" in more:
                got, full = got[:, cut[0] :], full[:, cut[0] :]
                worst = max(worst, apart(got, full))
            else:
                worst = max(worst, apart(got[real], full[real]))
    return worst


def generation_right(subject, steps=8):
    for d, h, kv in SIZES:
        m = make(subject, config(d, h, kv))
        ids = tokens(2, 4, seed=3)
        slow = ids
        for _ in range(steps):
            slow = torch.cat([slow, subject.forward(m, slow)[:, -1].argmax(-1, keepdim=True)], 1)
        if not all(torch.equal(subject.generate(m, ids, steps, u), slow) for u in (False, True)):
            return False
    return True


TIGHT = 1e-9


def say(n, what, right, wrong):
    print(f"{n}  {what}: right {right:.3g}, wrong {wrong:.3g}")


def load_pair(n):
    return load(f"{n}_right"), load(f"{n}_wrong")


def common(n, right, wrong):
    import difflib

    a, b = ((HERE / f"{n}_{w}.py").read_text().splitlines() for w in ("right", "wrong"))
    lines = [x for x in difflib.unified_diff(a, b, lineterm="", n=0) if x[:1] in "+-" and x[:3] not in ("+++", "---")]
    assert 2 <= len(lines) <= 4, (n, lines)
    assert dict(right.subject.declares) == dict(wrong.subject.declares)


def p01():
    R, W = load_pair("01")
    common("01", R, W)
    assert forward_error(R.subject, ref01) < TIGHT and cache_error(R.subject) < TIGHT and generation_right(R.subject)
    assert forward_error(R.subject, ref01, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    c = config(64, 4, 4, num_layers=6, d_ff=256)
    want = 0.02 / math.sqrt(12)

    def off(module):
        torch.manual_seed(0)
        m = module.subject.build(c)
        other = [p for k, p in m.named_parameters() if p.dim() > 1 and not k.endswith("c_proj.weight")]
        assert all(abs(p.std() / 0.02 - 1) < 0.1 for p in other)
        return max(abs(p.std().item() / want - 1) for k, p in m.named_parameters() if k.endswith("c_proj.weight"))

    r, w = off(R), off(W)
    assert r < 0.1 < 1 < w
    m = make(R.subject, config())
    ids, y = tokens(2, 5), tokens(2, 5, 9)
    y[0, 1] = -1
    lp = m(ids)[0].log_softmax(-1)
    nll = [-lp[b, t, y[b, t]] for b in range(2) for t in range(5) if y[b, t] >= 0]
    assert abs(R.subject.loss(m, ids, y) - sum(nll) / len(nll)) < 1e-9
    say("01", "std of c_proj against 0.02/sqrt(2L), relative error", r, w)


def p02():
    R, W = load_pair("02")
    common("02", R, W)
    assert forward_error(R.subject, ref02) < TIGHT and generation_right(R.subject)
    assert forward_error(R.subject, ref02, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    r, w = cache_error(R.subject), cache_error(W.subject)
    assert r < TIGHT and w > 1e-2
    say("02", "cached chunks against the whole", r, w)


def p03():
    R, W = load_pair("03")
    common("03", R, W)
    sizes = [*SIZES, (12, 3, 3), (24, 6, 6), (40, 5, 5)]
    assert cache_error(R.subject) < TIGHT and generation_right(R.subject)
    assert max(cache_error(R.subject, s) for s in ("left", "right")) < TIGHT
    r = forward_error(R.subject, ref03, ("left", "right"), sizes=sizes)
    w = forward_error(W.subject, ref03, ("left", "right"), sizes=SIZES[:2])
    assert forward_error(R.subject, ref03, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    assert r < TIGHT and w > 1e-2
    assert R.get_slopes(8) == [2.0 ** -(i + 1) for i in range(8)]
    say("03", "outputs with published slopes", r, w)


def p04():
    R, W = load_pair("04")
    common("04", R, W)
    assert forward_error(R.subject, ref04) < TIGHT and cache_error(R.subject) < TIGHT and generation_right(R.subject)
    assert forward_error(R.subject, ref04, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    r, w = cache_error(R.subject, reorder=[2, 0, 0]), cache_error(W.subject, reorder=[2, 0, 0])
    assert r < TIGHT and w > 1e-2
    say("04", "reordered cache against the whole of the reordered", r, w)


def p05():
    R, W = load_pair("05")
    common("05", R, W)
    assert forward_error(R.subject, ref05) < TIGHT and generation_right(R.subject)
    assert forward_error(R.subject, ref05, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    r, w = cache_error(R.subject), cache_error(W.subject)
    assert r < TIGHT and w > 1e-2
    say("05", "cached chunks against the whole", r, w)


def p06():
    R, W = load_pair("06")
    common("06", R, W)
    r, w = pair_error(R.subject, ref06), pair_error(W.subject, ref06, sizes=SIZES[:1])
    assert pair_error(R.subject, ref06, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    assert r < TIGHT and w > 1e-2
    m = make(W.subject, config()).decoder.relative_bias
    assert m(6, 6, "cpu")[0, 0].tril().unique().numel() == 2  # bucket 0 and the zeros of tril
    # left padding is the same as none
    m, src, trg = make(R.subject, config()), tokens(2, 5), tokens(2, 6, 4)
    sm, tm = masks(2, 5, "left"), masks(2, 6, "left")
    out = R.subject.forward(m, src, trg, sm, tm)
    for b in range(2):
        alone = R.subject.forward(m, src[b][sm[b]][None], trg[b][tm[b]][None])[0]
        assert apart(out[b][tm[b]], alone) < TIGHT
    say("06", "outputs against plain T5", r, w)


def p07():
    R, W = load_pair("07")
    common("07", R, W)
    r, w = pair_error(R.subject, ref07), pair_error(W.subject, ref07, sizes=SIZES[:1])
    assert pair_error(R.subject, ref07, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    assert r < TIGHT and w > 1e-2
    say("07", "outputs with the paper's sines and cosines", r, w)


def p08():
    R, W = load_pair("08")
    common("08", R, W)
    r = forward_error(R.subject, ref08, ("left", "right"))
    w = forward_error(W.subject, ref08, ("left", "right"), sizes=SIZES[:1])
    assert forward_error(R.subject, ref08, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    assert r < TIGHT and w > 1e-2

    def first_trained(module):
        m = make(module.subject, config())
        (module.subject.forward(m, tokens(2, 3)) ** 3).sum().backward()
        return m.embeddings.position_embeddings.weight.grad.abs().sum(-1).nonzero().flatten().tolist()

    assert first_trained(R) == [2, 3, 4] and first_trained(W) == [2, 3]
    say("08", "outputs with positions from row 2 on", r, w)


def p09():
    R, W = load_pair("09")
    common("09", R, W)
    r = forward_error(R.subject, ref09, ("right",))
    assert r < TIGHT and forward_error(R.subject, ref09, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    d, f, V = 8, 20, 11

    def excess(module, L):
        want = V * d + L * (4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d) + 2 * d
        return sum(p.numel() for p in module.subject.build(config(num_layers=L)).parameters()) - want

    assert excess(R, 1) == excess(R, 2) == excess(R, 4) == excess(W, 1) == 0
    a, b = R.subject.build(config()).encoder.layers
    assert not any(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()) if p.dim() > 1)
    assert excess(W, 2) < 0
    say("09", "parameters beyond those of 2 layers", excess(R, 2), excess(W, 2))


def p10():
    R, W = load_pair("10")
    common("10", R, W)
    r = forward_error(R.subject, ref10, ("left", "right"))
    w = forward_error(W.subject, ref10, ("left", "right"), sizes=SIZES[:2])
    assert forward_error(R.subject, ref10, sizes=SIZES[:1], dtype=torch.float32) < 1e-3
    assert r < TIGHT and w > 1e-2
    say("10", "outputs against attention head by head", r, w)


def p11():
    R, W = load_pair("11")
    common("11", R, W)
    r = forward_error(R.subject, ref11, ("right",), pooled=True)
    assert r < TIGHT and forward_error(R.subject, ref11, sizes=SIZES[:1], dtype=torch.float32, pooled=True) < 1e-3

    def eval_spread(module):
        m = make(module.subject, config(dropout=0.3))
        ids = tokens(3, 7)
        torch.manual_seed(0)
        return apart(module.subject.forward(m, ids), module.subject.forward(m, ids))

    m = make(R.subject, config(dropout=0.3), train=True)
    assert apart(m(tokens(3, 7)), m(tokens(3, 7))) > 1e-2
    m.eval()
    assert apart(m(tokens(1, 7))[0], ref11(m, tokens(1, 7)[0], config())) < TIGHT
    r, w = eval_spread(R), eval_spread(W)
    assert r == 0 and w > 1e-2
    say("11", "two forwards in eval mode, dropout 0.3", r, w)


def p12():
    R, W = load_pair("12")
    common("12", R, W)
    r = forward_error(R.subject, ref12, ("right",), pooled=True)
    w = forward_error(W.subject, ref12, ("right",), pooled=True, sizes=SIZES[:1])
    assert forward_error(R.subject, ref12, ("right",), sizes=SIZES[:1], dtype=torch.float32, pooled=True) < 1e-3
    assert r < TIGHT and w > 1e-2
    say("12", "padded against cut to the real tokens", r, w)


if __name__ == "__main__":
    with torch.random.fork_rng():
        for n in range(1, 13):
            globals()[f"p{n:02d}"]()
    print("12 pairs proved")
