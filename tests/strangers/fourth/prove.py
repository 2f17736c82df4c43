"""Every right file is right, every wrong one is not, in plain torch. One line a pair; asserts."""

import importlib.util
import itertools
import math
import pathlib
import pickle
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = pathlib.Path(__file__).parent


def load(n, which):
    name = f"{n:02d}_{which}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def sizes(subject, **over):
    c = dict(d_model=8, num_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=16, num_classes=3, dropout=0.0)
    for key, allowed in subject.domain.items():
        c[key] = allowed[-1]
    c.update(over)
    c.setdefault("num_key_value_heads", max(1, c["num_heads"] // 2))
    c["d_head"] = c["d_model"] // c["num_heads"]
    return SimpleNamespace(**c)


def make(n, which, seed=0, dtype=torch.float64, loud=True, **over):
    """loud: weights drawn again with unit gain, so that nothing hides behind small initial weights."""
    module = load(n, which)
    torch.manual_seed(seed)
    model = module.subject.build(sizes(module.subject, **over)).to(dtype).eval()
    if loud:
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for name, p in sorted(model.named_parameters()):
                if p.dim() > 1:
                    p.normal_(std=min(p.shape[-1] ** -0.5, 0.5) if p.shape[-1] > 1 else 0.5)
                else:
                    p.add_(0.3 * torch.randn_like(p))
    return module.subject, model


def close(a, b, tol=1e-9):
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and (a - b).abs().max().item() < tol


def tokens(B, T, seed=0, V=11):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- what every right one must do


def padded_mask(B, T, side):
    mask = torch.ones(B, T, dtype=torch.bool)
    for b in range(B):
        k = b % T
        if k:
            mask[b, -k:] = mask[b, -k:] & (side == "left")
            if side == "left":
                mask[b, :k] = False
    return mask


def sane(n):
    module = load(n, "right")
    s = module.subject
    kind = s.kind
    grid = [dict(zip(s.domain, values)) for values in itertools.product(*s.domain.values())] or [{}, dict(num_heads=1)]
    for over in grid:
        for layers in (1, 2, 3):
            _, model = make(n, "right", num_layers=layers, **over)
            c = sizes(s, **over)
            if s.inputs == "embeddings":
                x = torch.randn(3, 5, c.d_model, dtype=torch.float64)
                y = s.forward(model, x)
                assert close(s.forward(model, x[1:2]), y[1:2])
                y.sum().backward()
            elif kind == "encoder_decoder":
                src, tgt = tokens(4, 6, 1), tokens(4, 5, 2)
                y = s.forward(model, src, tgt)
                for t in range(1, 6):
                    assert close(s.forward(model, src, tgt[:, :t]), y[:, :t])
                assert not close(s.forward(model, src.roll(1, 1), tgt), y)
                m, tm = padded_mask(4, 6, "right"), padded_mask(4, 5, "right")
                y = s.forward(model, src, tgt, m, tm)
                for b in range(4):
                    alone = s.forward(model, src[b : b + 1, : m[b].sum()], tgt[b : b + 1, : tm[b].sum()])
                    assert close(alone, y[b : b + 1, : tm[b].sum()])
                ones = torch.ones_like
                assert close(s.forward(model, src, tgt, ones(m), ones(tm)), s.forward(model, src, tgt))
                m[0] = False
                assert torch.isfinite(s.forward(model, src, tgt, m, tm)).all()
                y.sum().backward()
            else:
                ids = tokens(4, 7, 1)
                y = s.forward(model, ids)
                assert torch.isfinite(y).all()
                if kind == "decoder":
                    for t in range(1, 8):
                        assert close(s.forward(model, ids[:, :t]), y[:, :t])
                masks = "attention_mask" in s.forward.__code__.co_varnames
                if masks:
                    assert close(s.forward(model, ids, torch.ones(4, 7, dtype=torch.bool)), y)
                    sides = {"both": ("left", "right")}.get(s.declares["padding_side"], ("right",))
                    for side in sides:
                        m = padded_mask(4, 7, side)
                        y = s.forward(model, ids, m)
                        for b in range(4):
                            alone = s.forward(model, ids[b : b + 1][:, m[b]])
                            assert close(alone, y[b : b + 1] if kind == "classifier" else y[b : b + 1][:, m[b]])
                    m[0] = False
                    z = s.forward(model, ids, m)
                    assert torch.isfinite(z).all() and (kind != "decoder" or close(z[1:], y[1:]))
                if s.cache is not None:
                    for cut in ([1] * 12, [3, 1, 2, 6], [5, 7], [12], [4, 4, 4]):
                        ids = tokens(4, 12, 3)
                        chunks = list(ids.split(cut, dim=1))
                        assert close(s.cache(model, chunks), s.forward(model, ids))
                        order = torch.tensor([2, 0, 0, 3])
                        if "reorder" in s.cache.__code__.co_varnames:
                            whole = torch.cat([ids[order][:, : cut[0]], ids[:, cut[0] :]], dim=1)
                            got, want = s.cache(model, chunks, reorder=order), s.forward(model, whole)
                            assert close(got[:, cut[0] :], want[:, cut[0] :]) if cut[0] < 12 else True
                        if masks:
                            m = torch.ones(4, 12, dtype=torch.bool)
                            for b in range(4):
                                m[b, :b] = False
                            got, want = s.cache(model, chunks, attention_mask=m), s.forward(model, ids, m)
                            assert close(got[m], want[m])
                if s.generate is not None:
                    g = [s.generate(model, tokens(3, 4), 9, use) for use in (True, False)]
                    assert torch.equal(*g) and g[0].shape == (3, 13) and torch.equal(g[0][:, :4], tokens(3, 4))
                    for t in range(4, 13):
                        assert torch.equal(s.forward(model, g[0][:, :t])[:, -1].argmax(-1), g[0][:, t])
                if s.embed is not None:
                    table = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
                    assert close(s.embed(model, table(ids)), s.forward(model, ids))
                s.forward(model, ids).sum().backward()
            for name, p in model.named_parameters():
                assert p.grad is not None and torch.isfinite(p.grad).all(), name
            again = pickle.loads(pickle.dumps(model))
            call = _call(s, c)
            assert close(call(again), call(model))
            model.train()
            assert close(call(model), call(again))  # no dropout at rate 0
    _, quiet = make(n, "right")
    _, noisy = make(n, "right", dropout=0.5)
    call = _call(s, sizes(s))
    assert close(call(quiet), call(noisy))
    if any("dropout" in k or "drop" in k.lower() for k in open(module.__file__).read().split()):
        noisy.train()
        assert not close(call(noisy), call(quiet))
    for dtype, tol in ((torch.float32, 1e-4), (torch.bfloat16, 1.0), (torch.float16, 0.2)):
        _, low = make(n, "right", dtype=torch.float64)
        assert close(call(low.to(dtype)).double(), call(quiet), tol), (n, dtype)
        _, cast = make(n, "right", dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.isfinite(call(cast)).all()
    if s.declares["beyond_max_len"] == "works" and s.inputs is None and kind != "encoder_decoder":
        assert torch.isfinite(s.forward(quiet, tokens(1, 40))).all()
    elif s.inputs is None:
        two = (tokens(1, 17),) * 2 if kind == "encoder_decoder" else (tokens(1, 17),)
        try:
            s.forward(quiet, *two)
            assert s.declares["beyond_max_len"] == "works"
        except ValueError:
            assert s.declares["beyond_max_len"] == "error"
    if kind == "encoder_decoder" or s.inputs is None:
        for T in (1, 16):
            assert torch.isfinite(s.forward(quiet, *((tokens(1, T),) * (2 if kind == "encoder_decoder" else 1)))).all()


def _call(s, c):
    if s.inputs == "embeddings":
        x = torch.randn(2, 5, c.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        return lambda m: s.forward(m, x.to(next(m.parameters()).dtype))
    if s.kind == "encoder_decoder":
        return lambda m: s.forward(m, tokens(2, 6, 1), tokens(2, 5, 2))
    return lambda m: s.forward(m, tokens(2, 6, 1))


# ---------------------------------------------------------------- one check a pair: True where right


def p01(w):
    s, m = make(1, w, loud=False, d_model=64, d_ff=256, num_layers=4, dtype=torch.float32)
    std = torch.cat([p.flatten() for k, p in m.named_parameters() if k.endswith("c_proj.weight")]).std().item()
    rest = torch.cat([p.flatten() for k, p in m.named_parameters() if k.endswith(("c_attn.weight", "c_fc.weight"))])
    assert abs(rest.std().item() / 0.02 - 1) < 0.05
    return abs(std / (0.02 / math.sqrt(8)) - 1) < 0.05


def p02(w):
    """Grouped queries are full heads whose keys and values are those of the group: head h takes h // (H / G)."""
    s, m = make(2, w, num_heads=4, num_key_value_heads=2, d_model=16)
    _, full = make(2, w, num_heads=4, num_key_value_heads=4, d_model=16)
    state = m.state_dict()
    for k in state:
        if "k_proj" in k or "v_proj" in k:
            state[k] = torch.cat([state[k][4 * (h // 2) : 4 * (h // 2) + 4] for h in range(4)])
    full.load_state_dict(state)
    ids = tokens(2, 6)
    return close(m(ids), full(ids))


def p03(w):
    s, m = make(3, w)
    ids = tokens(2, 9)
    ok = close(s.cache(m, list(ids.split(1, 1))), s.forward(m, ids))
    assert ok or not close(s.cache(m, list(ids.split([4, 5], 1))), s.forward(m, ids))
    return ok


def turned(x, dims, base=1e4):
    """Independent: channels i and i + dims/2 as one complex number."""
    half = dims // 2
    z = torch.complex(x[..., :half], x[..., half:dims])
    for t in range(x.shape[-2]):
        for i in range(half):
            z[..., t, i] = z[..., t, i] * torch.exp(torch.tensor(1j * t * base ** (-2 * i / dims), dtype=torch.complex128))
    return torch.cat([z.real, z.imag, x[..., dims:]], -1)


def p04(w):
    s, m = make(4, w)
    x = torch.randn(2, 2, 7, m.blocks[0].head_dim, dtype=torch.float64)
    return close(m.blocks[0].rotary(x, torch.arange(7)), turned(x, 4))


def p05(w):
    s, m = make(5, w, num_heads=2, num_key_value_heads=1, d_model=16)
    a = m.layers[0].self_attn
    with torch.no_grad():
        a.qkv_proj.weight.mul_(4)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    q, k, v = a.qkv_proj(x)[0].split([16, 8, 8], -1)
    out = torch.zeros(5, 16, dtype=torch.float64)
    kk = turned(k[None], 8)[0]
    for h in range(2):
        qq = turned(q[None, :, 8 * h : 8 * h + 8], 8)[0]
        for t in range(5):
            scores = torch.stack([50 * torch.tanh(qq[t] @ kk[j] / math.sqrt(8) / 50) for j in range(t + 1)])
            out[t, 8 * h : 8 * h + 8] = scores.softmax(0) @ v[: t + 1]
    want = a.o_proj(out)[None]
    got = a(x, torch.arange(5), torch.ones(5, 5, dtype=torch.bool).tril()[None, None])
    return close(got, want)


def p06(w):
    def published(n):  # get_slopes of the paper's repository
        def power_of_2(n):
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]

        if math.log2(n).is_integer():
            return power_of_2(n)
        c = 2 ** math.floor(math.log2(n))
        return power_of_2(c) + published(2 * c)[0::2][: n - c]

    build = load(6, w).build_alibi_tensor
    ok = True
    for heads in (1, 2, 3, 4, 6, 8, 12):
        bias = build(torch.ones(1, 5, dtype=torch.long), heads, torch.float64)[0, :, 0]
        want = torch.tensor(published(heads), dtype=torch.float64)[:, None] * torch.arange(5)
        ok = ok and close(bias, want)
    return ok


def t5_attention(a, x, bias, allowed, memory=None):
    """Heads one by one."""
    memory = x if memory is None else memory
    h = bias.shape[0]
    outs = []
    for i, (q, k, v) in enumerate(zip(*(l(y).chunk(h, -1) for l, y in ((a.q, x), (a.k, memory), (a.v, memory))))):
        scores = q @ k.transpose(-1, -2) + bias[i]
        outs.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v)
    return a.o(torch.cat(outs, -1))


def rms(x, weight, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def t5_bucket(query, key, n, far, both):
    """The rule of the paper's code, one pair at a time."""
    d, base = key - query, 0
    if both:
        n //= 2
        base = n if d > 0 else 0
        d = abs(d)
    else:
        d = max(-d, 0)
    exact = n // 2
    if d < exact:
        return base + d
    return base + min(n - 1, exact + int(math.log(d / exact) / math.log(far / exact) * (n - exact)))


def bias_of(table, length, n, far, both):
    return torch.stack([torch.stack([table[t5_bucket(i, j, n, far, both)] for j in range(length)]) for i in range(length)]).permute(2, 0, 1)


def p07(w):
    s, m = make(7, w, num_layers=3)
    ids = tokens(2, 40)
    x = m.shared(ids)
    bias = bias_of(m.block[0].self_attention.relative_attention_bias.weight, 40, 32, 128, False)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()
    for b in m.block:
        x = x + t5_attention(b.self_attention, rms(x, b.attention_norm.weight), bias, allowed)
        x = x + b.wo(b.wi(rms(x, b.ff_norm.weight)).relu())
    return close(s.forward(m, ids), m.lm_head(rms(x, m.final_layer_norm.weight)), 1e-8)


def p08(w):
    s, m = make(8, w)
    ids = tokens(2, 12)
    ok = close(s.cache(m, list(ids.split(1, 1))), s.forward(m, ids))
    assert close(s.cache(m, list(ids[:, :5].split(1, 1))), s.forward(m, ids[:, :5]))  # as long as nothing rolls
    return ok


def p09(w):
    s, m = make(9, w)
    ids, order = tokens(3, 7), torch.tensor([2, 0, 1])
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :1], mask[1, :2] = False, False
    got = s.cache(m, [ids[:, :3], ids[:, 3:5], ids[:, 5:]], mask, order)
    want = s.forward(m, torch.cat([ids[order, :3], ids[:, 3:]], 1), mask[order])
    assert close(s.cache(m, [ids[:, :3], ids[:, 3:]], mask)[mask], s.forward(m, ids, mask)[mask])
    return close(got[:, 3:], want[:, 3:])


def p10(w):
    norm = load(10, w).LayerNorm(8).double()
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    return close(norm(x), F.layer_norm(x, (8,), eps=1e-6))


def p11(w):
    s, m = make(11, w)
    src, tgt, labels = tokens(3, 6), tokens(3, 5, 1), tokens(3, 5, 2)
    full = s.loss(m, src, tgt, labels)
    assert close(full, F.cross_entropy(s.forward(m, src, tgt).flatten(0, 1), labels.flatten()))
    labels[0, 3:], labels[2, 1:] = -100, -100
    logp = s.forward(m, src, tgt).log_softmax(-1)
    terms = [-logp[b, t, labels[b, t]] for b in range(3) for t in range(5) if labels[b, t] != -100]
    return close(s.loss(m, src, tgt, labels), sum(terms) / len(terms))


def p12(w):
    s, m = make(12, w)
    src, tgt = tokens(2, 20), tokens(2, 18, 1)
    flat = torch.zeros(2, 18, 20, dtype=torch.float64)

    def run(stack, ids, both, memory=None):
        n = ids.shape[1]
        bias = bias_of(stack.relative_attention_bias.weight, n, 8, 16, both)
        allowed = torch.ones(n, n, dtype=torch.bool) if both else torch.ones(n, n, dtype=torch.bool).tril()
        x = m.shared(ids)
        for b in stack.blocks:
            x = x + t5_attention(b.self_attention, rms(x, b.norm_self.weight), bias, allowed)
            if memory is not None:
                seen = torch.ones(n, 20, dtype=torch.bool)
                x = x + t5_attention(b.cross_attention, rms(x, b.norm_cross.weight), flat, seen, memory)
            x = x + b.wo(b.wi(rms(x, b.norm_ff.weight)).relu())
        return rms(x, stack.final_norm.weight)

    x = run(m.decoder, tgt, False, run(m.encoder, src, True))
    return close(s.forward(m, src, tgt), (x * 8**-0.5) @ m.shared.weight.T, 1e-8)


def p13(w):
    s, m = make(13, w, num_heads=4, d_model=16)
    a = m.decoder.blocks[0].cross_attn
    x, xa = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    q, k, v = (l(y).unflatten(-1, (4, 4)).transpose(1, 2) for l, y in ((a.query, x), (a.key, xa), (a.value, xa)))
    want = a.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return close(a(x, xa), want)


def padding_ignored(n, w):
    s, m = make(n, w)
    ids = tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    got, want = s.forward(m, ids, mask)[1:], s.forward(m, ids[1:, :4])
    return close(got if s.kind == "classifier" else got[:, :4], want)


def p14(w):
    return padding_ignored(14, w)


def p15(w):
    s, m = make(15, w)
    a, rel = m.layer[0].attention, m.rel_embeddings.weight
    n, K, d = 12, 8, 8
    x = torch.randn(1, n, 16, dtype=torch.float64)
    delta = lambda i, j: 0 if i - j <= -K else 2 * K - 1 if i - j >= K else i - j + K  # the paper's (3)
    qc, kc, v = a.query_proj(x)[0], a.key_proj(x)[0], a.value_proj(x)[0]
    kr, qr = a.pos_key_proj(rel), a.pos_query_proj(rel)
    out = torch.zeros(n, 16, dtype=torch.float64)
    for h in range(2):
        at = slice(d * h, d * h + d)
        scores = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            for j in range(n):
                scores[i, j] = (
                    qc[i, at] @ kc[j, at] + qc[i, at] @ kr[delta(i, j), at] + kc[j, at] @ qr[delta(j, i), at]
                ) / math.sqrt(3 * d)
        out[:, at] = scores.softmax(-1) @ v[:, at]
    got = a(x, rel, torch.ones(1, 1, 1, n, dtype=torch.bool))[0]
    return close(got, out)


def p16(w):
    module = load(16, w)
    x = torch.randn(1, 1, 9, 8, dtype=torch.float64)
    got = module.apply_rotary(x, *module.RotaryEmbedding(8)(9, x))
    want = torch.empty_like(x)
    for t in range(9):
        for i in range(4):
            a = t * 1e4 ** (-2 * i / 8)
            want[..., t, 2 * i] = x[..., t, 2 * i] * math.cos(a) - x[..., t, 2 * i + 1] * math.sin(a)
            want[..., t, 2 * i + 1] = x[..., t, 2 * i] * math.sin(a) + x[..., t, 2 * i + 1] * math.cos(a)
    return close(got, want)


def p17(w):
    s, m = make(17, w, loud=False)
    s.forward(m, tokens(3, 6)).sum().backward()
    assert not m.embeddings.word_embeddings.weight.grad[0].any()
    return not m.embeddings.word_embeddings.weight[0].any()


def p18(w):
    return padding_ignored(18, w)


def p19(w):
    return padding_ignored(19, w)


def p20(w):
    s, m = make(20, w, dropout=0.3)
    _, without = make(20, w, dropout=0.0)
    ids = tokens(3, 5)
    return close(s.forward(m, ids), s.forward(without, ids)) and close(s.forward(m, ids), s.forward(m, ids))


def p21(w):
    s, m = make(21, w)
    images = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    want = torch.empty(2, 6, 12, dtype=torch.float64)
    for r in range(2):
        for k in range(3):
            want[:, 3 * r + k] = images[:, :, 2 * r : 2 * r + 2, 2 * k : 2 * k + 2].flatten(1)
    assert close(want, F.unfold(images, 2, stride=2).transpose(1, 2))
    return close(s.patches(m, images), m.patch_embed.proj(want))


for n in range(1, 22):
    check = globals()[f"p{n:02d}"]
    right, wrong = load(n, "right").subject, load(n, "wrong").subject
    assert right.declares == wrong.declares and right.domain == wrong.domain and right.kind == wrong.kind
    sane(n)
    assert check("right"), n
    assert not check("wrong"), n
    print(f"{n:02d} {right.kind:16s} {right.name:18s} right: holds; wrong: does not ({(check.__doc__ or '').strip() or check.__name__})")
print("all proved")
