"""For each pair: the right file agrees with an independent naive computation or a known identity, the wrong one does
not, and elsewhere (where the mistake must not show) both agree. Plain torch; no check of veriformer is run."""

import importlib.util
import math
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig

HERE = Path(__file__).parent
torch.set_default_dtype(torch.float32)


def load(number, side):
    path = next(HERE.glob(f"{number:02d}_*_{side}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module, double=True, seed=0, loud=True, **sizes):
    """The subject's model in given sizes, with weights of unit gain from one seed."""
    torch.manual_seed(seed)
    base = {f: getattr(DrawnConfig(), f) for f in ("d_model", "num_heads", "num_key_value_heads", "num_layers")}
    base |= {f: getattr(DrawnConfig(), f) for f in ("d_ff", "vocab_size", "max_len", "num_classes", "dropout")}
    base |= sizes
    base["num_key_value_heads"] = base["num_heads"]
    model = module.subject.build(DrawnConfig(**base))
    if isinstance(model, torch.nn.Module):
        if loud:
            torch.manual_seed(seed + 1)
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn_like(p) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 3) + (p.dim() == 1))
        model = model.double() if double else model
        model.eval()
    return model


def gap(a, b):
    return (a.double() - b.double()).abs().max().item()


def verdict(right, wrong, same=0.0, floor=1e-3, tight=1e-9):
    """The right one's error is rounding, the wrong one's is not; where the mistake must not show they are alike."""
    assert right <= tight, f"right is off by {right}"
    assert wrong >= floor, f"wrong is off by {wrong} alone"
    assert same <= tight, f"elsewhere they differ by {same}"
    return f"right off by {right:.1e}, wrong by {wrong:.1e}, alike elsewhere to {same:.1e}"


def softmax_attention(q, k, v, allowed, scale=None, cap=None):
    """Row by row, with deleted keys deleted."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                keep = allowed[b, t].nonzero().flatten()
                if not len(keep):
                    continue
                z = (k[b, h, keep] @ q[b, h, t]) * (scale or q.shape[-1] ** -0.5)
                z = cap * torch.tanh(z / cap) if cap else z
                e = torch.exp(z - z.max())
                out[b, h, t] = (e[:, None] * v[b, h, keep]).sum(0) / e.sum()
    return out


def p01(R, W):
    right = wrong = same = 0.0
    torch.manual_seed(0)
    for T, S in ((3, 3), (16, 16), (17, 17), (40, 40), (70, 70), (5, 37), (37, 21)):
        q, k, v = (torch.randn(2, n, L, 8, dtype=torch.float64) for n, L in ((4, T), (2, S), (2, S)))
        causal = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        extra = torch.rand(2, T, S) < 0.7
        kk, vv = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        for mask, c in ((None, True), (extra, True), (extra, False), (None, False)):
            allowed = (causal if c else torch.ones_like(causal)).expand(2, T, S) & (True if mask is None else mask)
            want = softmax_attention(q, kk, vv, allowed)
            given = None if mask is None else mask[:, None]
            a, b = (m.subject.forward(None, q, k, v, attention_mask=given, causal=c) for m in (R, W))
            right = max(right, gap(a, want))
            if c and T > 16:
                wrong = max(wrong, gap(b, want))
            elif not c or (T <= 16 and T == S):
                same = max(same, gap(a, b))
    return verdict(right, wrong, same)


def p02(R, W):
    a, b = make(R), make(W)
    tokens = torch.randint(11, (2, 14))
    full = R.subject.forward(a, tokens)
    assert gap(full, W.subject.forward(b, tokens)) == 0

    # naive: one query at a time, its window taken by a slice, angles by complex numbers
    def turn(x, t):
        half = x.shape[-1] // 2
        z = torch.complex(x[..., :half], x[..., half:])
        rate = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=torch.float64)
        z = z * torch.polar(torch.ones_like(rate), t * rate)
        return torch.cat([z.real, z.imag], -1)

    def norm(m, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * m.weight

    x = a.tok_embeddings.weight[tokens]
    for L in a.layers:
        n = norm(L.attention_norm, x)
        q, k, v = (n @ w.T for w in L.attention.wqkv.weight.chunk(3))
        rows = []
        for t in range(14):
            lo, heads = max(0, t - 3), []
            for h in range(2):
                s = slice(4 * h, 4 * h + 4)
                kk = torch.stack([turn(k[:, j, s], j) for j in range(lo, t + 1)], 1)
                w = torch.softmax((kk @ turn(q[:, t, s], t)[..., None]).squeeze(-1) / 2, -1)
                heads.append((w[..., None] * v[:, lo : t + 1, s]).sum(1))
            rows.append(torch.cat(heads, -1))
        x = x + torch.stack(rows, 1) @ L.attention.wo.weight.T
        n = norm(L.ffn_norm, x)
        g = n @ L.w1.weight.T
        x = x + (g * torch.sigmoid(g) * (n @ L.w3.weight.T)) @ L.w2.weight.T
    want = norm(a.norm, x) @ a.output.weight.T
    right, wrong, same = gap(full, want), 1.0, 0.0
    for cuts in ([14], [1] * 14, [9] + [1] * 5, [2, 1, 1, 1, 1]):
        chunks = tokens[:, : sum(cuts)].split(cuts, 1)
        for M, m in ((R, a), (W, b)):
            same = max(same, gap(M.subject.cache(m, chunks), full[:, : sum(cuts)]))
    for cuts in ([5, 2, 7], [4, 3, 3, 4], [7, 7]):
        chunks = tokens.split(cuts, 1)
        right = max(right, gap(R.subject.cache(a, chunks), full))
        wrong = min(wrong, gap(W.subject.cache(b, chunks), full))
    return verdict(right, wrong, same)


def p03(R, W):
    def published(rel, buckets=32, far=128):  # mesh-tensorflow, a number at a time
        side = buckets // 2
        out, n = (side if rel > 0 else 0), abs(rel)
        exact = side // 2
        if n < exact:
            return out + n
        return out + min(side - 1, exact + int(math.log(n / exact) / math.log(far / exact) * (side - exact) + 1e-6))

    a, b = make(R), make(W)
    T, S = 150, 140
    want = torch.stack([torch.stack([a.table.weight[published(j - i)] for j in range(S)]) for i in range(T)])
    x, y = R.subject.forward(a, T, S), W.subject.forward(b, T, S)
    near = (torch.arange(S)[None] - torch.arange(T)[:, None]).abs() < 9
    assert len(set(W.subject.build(DrawnConfig()).bucket_of(torch.arange(15, 150)).tolist())) == 1
    return verdict(gap(x, want.permute(2, 0, 1)), gap(y, x), gap(x[:, near], y[:, near]))


def p04(R, W):
    right, wrong, same = 0.0, 1.0, 0.0
    for d, h in ((8, 2), (24, 2), (32, 2), (64, 1)):
        a, b = make(R, d_model=d, num_heads=h), make(W, d_model=d, num_heads=h)
        K = d // h
        x = torch.randn(2, h, 7, K, dtype=torch.float64)
        places = torch.tensor([0, 1, 2, 3, 10, 500, 4000])
        want = x.clone()
        for t, place in enumerate(places.tolist()):
            for i in range(2):  # 4 of K channels, in pairs, theta = 10000^(-2i/4)
                angle = place * 10000.0 ** (-2 * i / 4)
                u, w = x[:, :, t, 2 * i], x[:, :, t, 2 * i + 1]
                want[:, :, t, 2 * i] = u * math.cos(angle) - w * math.sin(angle)
                want[:, :, t, 2 * i + 1] = u * math.sin(angle) + w * math.cos(angle)
        right = max(right, gap(R.subject.forward(a, x, places), want))
        off = gap(W.subject.forward(b, x, places), want)
        if K == 4:
            same = off
        else:
            wrong = min(wrong, off)
    return verdict(right, wrong, same)


def p05(R, W):
    # the slopes of the authors' code (get_slopes of Press et al.), written by its recursion
    def published(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        below = 2 ** math.floor(math.log2(n))
        return published(below) + published(2 * below)[0::2][: n - below]

    for n in range(1, 33):
        assert all(math.isclose(x, y) for x, y in zip(R.alibi_slopes(n), published(n), strict=True))
    for n in (3, 5, 6, 12):
        assert len(set(W.alibi_slopes(n))) < n == len(set(R.alibi_slopes(n)))
    right, wrong, same = 0.0, 1.0, 0.0
    for d, h in ((8, 2), (8, 4), (24, 3), (48, 6)):
        a, b = make(R, d_model=d, num_heads=h), make(W, d_model=d, num_heads=h)
        tokens = torch.randint(11, (2, 9))
        x = F.layer_norm(a.embed.weight[tokens], (d,), a.embed_norm.weight, a.embed_norm.bias)
        for L in a.layers:
            n = F.layer_norm(x, (d,), L.norm_a.weight, L.norm_a.bias)
            allowed = torch.ones(9, 9, dtype=torch.bool).tril()
            total = 0
            for i in range(h):
                bias = -published(h)[i] * (torch.arange(9)[:, None] - torch.arange(9)[None]).double()
                s = (n @ L.q[i]) @ (n @ L.k[i]).mT / math.sqrt(d // h) + bias
                total = total + s.masked_fill(~allowed, -torch.inf).softmax(-1) @ (n @ L.v[i]) @ L.o[i]
            x = x + total
            n = F.layer_norm(x, (d,), L.norm_f.weight, L.norm_f.bias) @ L.up
            x = x + (0.5 * n * (1 + torch.tanh(math.sqrt(2 / math.pi) * (n + 0.044715 * n**3)))) @ L.down
        want = F.layer_norm(x, (d,), a.norm.weight, a.norm.bias) @ a.embed.weight.T
        right = max(right, gap(R.subject.forward(a, tokens), want))
        off = gap(W.subject.forward(b, tokens), want)
        if h in (2, 4):
            same = max(same, off)
        else:
            wrong = min(wrong, off)
    return verdict(right, wrong, same)


def p06(R, W):
    """torch.nn.Transformer with the same weights; its masks say True = hidden."""
    a, b = make(R), make(W)
    d = 8
    source, target = torch.randint(11, (2, 6)), torch.randint(11, (2, 5))
    sm, tm = torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    sm[0, 4:], tm[1, 3:] = False, False
    twin = torch.nn.Transformer(d, 2, 2, 2, 20, 0.0, "relu", batch_first=True).double().eval()
    twin.encoder.norm = twin.decoder.norm = None

    def put(mha, mine):
        mha.in_proj_weight.copy_(torch.cat([mine.query.weight, mine.key.weight, mine.value.weight]))
        mha.in_proj_bias.copy_(torch.cat([mine.query.bias, mine.key.bias, mine.value.bias]))
        mha.out_proj.load_state_dict(mine.output.state_dict())

    with torch.no_grad():
        for theirs, mine in zip([*twin.encoder.layers, *twin.decoder.layers], [*a.encoder, *a.decoder]):
            put(theirs.self_attn, mine.attention)
            if hasattr(mine, "source"):
                put(theirs.multihead_attn, mine.source)
            theirs.linear1.load_state_dict(mine.feed_forward[0].state_dict())
            theirs.linear2.load_state_dict(mine.feed_forward[2].state_dict())
            for n in ("norm1", "norm2", "norm3"):
                if hasattr(mine, n):
                    getattr(theirs, n).load_state_dict(getattr(mine, n).state_dict())

    def table(T):
        return torch.tensor(
            [
                [(math.sin if c % 2 == 0 else math.cos)(p / 10000 ** ((c - c % 2) / d)) for c in range(d)]
                for p in range(T)
            ],
            dtype=torch.float64,
        )

    x = a.source_embedding(source) * math.sqrt(d) + table(6)
    y = a.target_embedding(target) * math.sqrt(d) + table(5)
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    want = a.generator(
        twin(x, y, tgt_mask=hidden, src_key_padding_mask=~sm, tgt_key_padding_mask=~tm, memory_key_padding_mask=~sm)
    )
    good, bad = (M.subject.forward(m, source, target, sm, tm) for M, m in ((R, a), (W, b)))
    same = gap(R.subject.forward(a, source, target, None, tm), W.subject.forward(b, source, target, None, tm))
    same = max(same, gap(good[1], bad[1]))  # the sample without padding in its source
    return verdict(gap(good[tm], want[tm]), gap(bad[tm], want[tm]), same)


def p07(R, W):
    a, b = make(R), make(W)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    want = torch.zeros_like(x)
    ascending = torch.zeros(3, 5, dtype=torch.bool)
    for i in range(3):
        for t in range(5):
            z = torch.exp(a.gate.weight @ x[i, t])
            best = sorted(range(4), key=lambda e: -z[e])[:2]
            ascending[i, t] = best[0] < best[1]
            for e in best:
                want[i, t] += z[e] / sum(z[best]) * a.experts[e](x[i, t])
    dense = R.subject.router(a, x)
    by_router = sum(dense[..., e, None] * a.experts[e](x) for e in range(4))
    good, bad = R.subject.forward(a, x), W.subject.forward(b, x)
    assert 0 < ascending.sum() < 15 and gap(W.subject.router(b, x), dense) == 0
    return verdict(max(gap(good, want), gap(good, by_router)), gap(bad, want), gap(good[ascending], bad[ascending]))


def p08(R, W):
    a, b = make(R), make(W)
    conv = torch.nn.functional.conv2d
    kernel, bias = a.patch_proj.weight.view(8, 3, 4, 4), a.patch_proj.bias

    def want(images):
        x = conv(images, kernel, bias, stride=4).flatten(2).mT
        return torch.cat([a.cls_token.expand(len(x), 1, 8), x], 1)

    wide, square = torch.randn(2, 3, 8, 12, dtype=torch.float64), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    good, bad = R.subject.patches(a, wide), W.subject.patches(b, wide)
    same = max(gap(R.subject.patches(a, square), want(square)), gap(W.subject.patches(b, square), want(square)))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    block = torch.nn.TransformerEncoderLayer(8, 2, 20, 0.0, "gelu", 1e-6, True, True).double().eval()
    y = x
    for mine in a.blocks:
        block.self_attn.in_proj_weight.data.copy_(mine.attn.qkv.weight)
        block.self_attn.in_proj_bias.data.copy_(mine.attn.qkv.bias)
        block.self_attn.out_proj.load_state_dict(mine.attn.proj.state_dict())
        block.linear1.load_state_dict(mine.mlp[0].state_dict())
        block.linear2.load_state_dict(mine.mlp[2].state_dict())
        block.norm1.load_state_dict(mine.norm1.state_dict())
        block.norm2.load_state_dict(mine.norm2.state_dict())
        y = block(y)
    same = max(same, gap(R.subject.forward(a, x), y), gap(W.subject.forward(b, x), y))
    return verdict(gap(good, want(wide)), gap(bad, want(wide)), same)


def p09(R, W):
    logits, labels = torch.randn(2, 6, 11, dtype=torch.float64), torch.randint(11, (2, 6))
    some = labels.clone()
    some[0, 3:] = -100

    def want(y):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)

    same = max(gap(M.subject.forward(None, logits, labels), want(labels)) for M in (R, W))
    good, bad = (M.subject.forward(None, logits, some) for M in (R, W))
    return verdict(gap(good, want(some)), gap(bad, want(some)), same)


def p10(R, W):
    a, b = make(R, double=False), make(W, double=False)
    x = torch.randn(2, 5, 8)
    want = F.rms_norm(x.double(), (8,), a.weight.double(), 1e-5)
    same = max(gap(R.subject.forward(a, x), want), gap(W.subject.forward(b, x), want))
    ok = max(gap(R.subject.forward(a.half(), x.half()), want), gap(W.subject.forward(b.half(), x.half()), want))
    assert ok < 0.02  # ordinary halves: both are right
    loud = (x * 1000).half()
    want = F.rms_norm(loud.double(), (8,), a.weight.double(), 1e-5)
    good, bad = R.subject.forward(a, loud), W.subject.forward(b, loud)
    assert gap(good, want) < 4e-3 and (bad == 0).any()
    verdict(0.0, gap(bad, want), same, tight=1e-5)
    return f"at 1000 times the size in float16: right off by {gap(good, want):.1e}, wrong by {gap(bad, want):.1e}"


def p11(R, W):
    a, b = make(R), make(W)
    plain = ["the quick fox", "", " ", "  two  spaces ", "line\nbreak", "zzz 123", "the dog sleeps, the fox"]
    odd = ["naïve café", "日本語", "😀 the fox", "…"]
    for text in plain + odd:
        ids = R.subject.forward(a, text)
        assert ids == W.subject.forward(b, text) and R.subject.decode(a, ids) == text
        # naive encoder: every merge in order of rank, over the whole word
        naive = []
        for word in R.split_words(text):
            pieces = [bytes([c]) for c in word.encode()]
            for (left, right), new in a.rank.items():
                i = 0
                while i + 1 < len(pieces):
                    if (pieces[i], pieces[i + 1]) == (a.pieces[left], a.pieces[right]):
                        pieces[i : i + 2] = [a.pieces[new]]
                    i += 1
            naive += pieces
        assert naive == [a.pieces[i] for i in ids] and b"".join(naive) == text.encode()
    assert all(W.subject.decode(b, W.subject.forward(b, t)) == t for t in plain)
    assert all("\ufffd" in W.subject.decode(b, W.subject.forward(b, t)) for t in odd)
    return f"right gives back all, wrong gives {W.subject.decode(b, W.subject.forward(b, 'café'))!r} for 'café'"


def p12(R, W):
    right = wrong = same = 0.0
    for causal in (False, True):
        q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64) * 3 for h, n in ((4, 5), (2, 6), (2, 6)))
        mask = torch.rand(2, 1, 5, 6) < 0.8
        mask[0, 0, 2] = False
        allowed = mask[:, 0] & (torch.ones(5, 6, dtype=torch.bool).tril() if causal else True)
        grad = torch.randn(2, 4, 5, 4, dtype=torch.float64)

        def run(function):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = function(*leaves)
            out.backward(grad)
            return out.detach(), [t.grad for t in leaves]

        def naive(q, k, v):
            return softmax_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), allowed, cap=5.0)

        want, grads = run(naive)
        good, g = run(lambda *t: R.subject.forward(None, *t, attention_mask=mask, causal=causal))
        bad, w = run(lambda *t: W.subject.forward(None, *t, attention_mask=mask, causal=causal))
        right = max(right, gap(good, want), *(gap(i, j) for i, j in zip(g, grads)))
        wrong = max(wrong, gap(w[0], grads[0]))
        same = max(same, gap(bad, want), gap(w[2], grads[2]))
    return verdict(right, wrong, same)


def p13(R, W):
    a, b = make(R), make(W)

    def decayed(M, m):
        names = {id(p): n for n, p in m.named_parameters()}
        groups = M.subject.forward(m)
        every = [id(p) for g in groups for p in g["params"]]
        assert sorted(every) == sorted(names)  # each once
        return {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}

    matrices = {n for n, p in a.named_parameters() if p.dim() > 1}
    assert decayed(R, a) == matrices
    extra = decayed(W, b) - matrices
    gains = {n + ".weight" for n, m in b.named_modules() if isinstance(m, torch.nn.LayerNorm)}
    assert extra == gains and not matrices - decayed(W, b)
    return f"right decays the {len(matrices)} matrices; wrong {len(extra)} gains of norms besides"


def p14(R, W):
    def shares(M):
        model = make(M, vocab_size=1000)
        tokens = torch.randint(1000, (200, 500))
        count, total = Counter(), 0
        for seed in range(5):
            inputs, labels = M.subject.forward(model, tokens, seed)
            again = M.subject.forward(model, tokens, seed)
            assert torch.equal(inputs, again[0]) and torch.equal(labels, again[1])
            chosen = labels != -100
            assert torch.equal(labels[chosen], tokens[chosen]) and torch.equal(inputs[~chosen], tokens[~chosen])
            assert not (chosen & (tokens < 4)).any()
            total += chosen.sum().item() / (tokens >= 4).sum().item() / 5
            n = chosen.sum().item()
            count["mask"] += (chosen & (inputs == 3)).sum().item() / n / 5
            count["kept"] += (chosen & (inputs == tokens)).sum().item() / n / 5
            count["random"] += (chosen & (inputs != tokens) & (inputs != 3)).sum().item() / n / 5
        assert abs(total - 0.15) < 0.005 and abs(count["mask"] - 0.8) < 0.01
        return {name: round(share, 3) for name, share in count.items()}

    good, bad = shares(R), shares(W)
    assert abs(good["kept"] - 0.1) < 0.01 and abs(good["random"] - 0.1) < 0.01
    assert abs(bad["kept"] - 0.18) < 0.01 and abs(bad["random"] - 0.02) < 0.01
    return f"right {good}, wrong {bad}"


def p15(R, W):
    a, b = make(R), make(W)
    tokens = torch.randint(11, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, :2], mask[2, :4] = False, False
    full = R.subject.forward(a, tokens, mask)
    right = wrong = 0.0
    for row, pad in enumerate((0, 2, 4)):  # padding taken away gives the same
        alone = R.subject.forward(a, tokens[row : row + 1, pad:])
        right = max(right, gap(full[row, pad:], alone[0]))
    # and the model itself, naively, without mask and cache
    x = a.wte.weight[tokens] + a.wpe.weight[:9]
    for L in a.h:
        n = L.ln_1(x)
        q, k, v = (n @ w.T + c for w, c in zip(L.attn.c_attn.weight.chunk(3), L.attn.c_attn.bias.chunk(3)))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        y = softmax_attention(q, k, v, torch.ones(9, 9, dtype=torch.bool).tril().expand(3, 9, 9))
        x = x + L.attn.c_proj(y.transpose(1, 2).flatten(2))
        n = L.c_fc(L.ln_2(x))
        x = x + L.c_proj(0.5 * n * (1 + torch.tanh(math.sqrt(2 / math.pi) * (n + 0.044715 * n**3))))
    right = max(right, gap(a.ln_f(x) @ a.wte.weight.T, R.subject.forward(a, tokens)))
    order = torch.tensor([2, 2, 0])
    mixed = torch.cat([tokens[order][:, :5], tokens[:, 5:]], 1)
    beams = R.subject.forward(a, mixed, mask[order])
    same = gap(W.subject.forward(b, tokens, mask), full)
    for cuts in ([5, 4], [5, 1, 1, 2]):
        chunks = tokens.split(cuts, 1)
        for M, m in ((R, a), (W, b)):
            same = max(same, gap(M.subject.cache(m, chunks), M.subject.forward(m, tokens)))
            got = M.subject.cache(m, chunks, attention_mask=mask)
            moved = M.subject.cache(m, chunks, attention_mask=mask, reorder=order)
            off = max(gap(got[mask], full[mask]), gap(moved[:, 5:], beams[:, 5:]))
            if M is R:
                right = max(right, off)
            else:
                wrong = max(wrong, off)
    return verdict(right, wrong, same)


def p16(R, W):
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    right = wrong = same = 0.0
    for p in (0.0, 0.3):
        a, b = make(R, dropout=p), make(W, dropout=p)
        n = F.layer_norm(x, (8,), a.norm.weight, a.norm.bias)
        q, k, v, ff = (n @ a.fused_in.weight.T + a.fused_in.bias).split([8, 8, 8, 20], -1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        y = softmax_attention(q, k, v, mask[:, None].expand(2, 6, 6)).transpose(1, 2).flatten(2)
        gelu = ff * 0.5 * (1 + torch.erf(ff / math.sqrt(2)))
        want = x + a.attn_out(y) + a.ff_out(gelu)
        right = max(right, gap(R.subject.forward(a, x, mask), want))
        off = gap(W.subject.forward(b, x, mask), want)
        if p:
            wrong = off
            assert gap(W.subject.forward(b, x, mask), W.subject.forward(b, x, mask)) > 1e-3
            torch.manual_seed(5)
            u = R.subject.forward(a.train(), x, mask)
            torch.manual_seed(5)
            same = max(same, gap(u, W.subject.forward(b.train(), x, mask)))
        else:
            same = off
    return verdict(right, wrong, same)


def p17(R, W):
    a, b = make(R), make(W)
    x, memory = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 6, 8, dtype=torch.float64)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 4:], mask[1, 0] = False, False
    q, (k, v) = x @ a.to_q.weight.T, (memory @ a.to_kv.weight.T).split(8, -1)
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
    null = a.null_kv.detach()
    k = torch.cat([null[0].expand(3, 2, 1, 4), k], 2)
    v = torch.cat([null[1].expand(3, 2, 1, 4), v], 2)

    def want(mask):
        allowed = torch.cat([torch.ones(3, 1, dtype=torch.bool), mask], 1)[:, None].expand(3, 4, 7)
        return softmax_attention(q, k, v, allowed).transpose(1, 2).flatten(2) @ a.to_out.weight.T

    whole = torch.ones_like(mask)
    right = max(gap(R.subject.forward(a, x, memory, m), want(m)) for m in (mask, whole))
    same = max(gap(W.subject.forward(b, x, memory, m), want(whole)) for m in (None, whole))
    wrong = min(gap(W.subject.forward(b, x, memory, mask)[i], want(mask)[i]) for i in (0, 1))
    return verdict(right, wrong, same)


def p18(R, W):
    stds = []
    for M in (R, W):
        model = make(M, loud=False, double=False, d_model=64, d_ff=256, num_layers=6, num_heads=4, vocab_size=300)
        by = {}
        for n, p in model.named_parameters():
            kind = "proj" if n.endswith("c_proj.weight") else "bias" if n.endswith("bias") else "gain" if "ln_" in n else "other"
            by.setdefault(kind, []).append(p.detach().flatten())
        by = {kind: torch.cat(values) for kind, values in by.items()}
        assert (by["bias"] == 0).all() and (by["gain"] == 1).all() and abs(by["other"].std() - 0.02) < 2e-4
        assert model.lm_head.weight is model.transformer.wte.weight
        stds.append(by["proj"].std().item())
    assert abs(stds[0] - 0.02 / math.sqrt(12)) < 1e-4 and abs(stds[1] - 0.02) < 2e-4
    a, b = make(R), make(W)
    tokens = torch.randint(11, (2, 9))
    x = a.transformer.wte.weight[tokens] + a.transformer.wpe.weight[:9]
    for L in a.transformer.h:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in L.attn.c_attn(L.ln_1(x)).chunk(3, -1))
        y = softmax_attention(q, k, v, torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 9, 9))
        x = x + L.attn.c_proj(y.transpose(1, 2).flatten(2))
        n = L.mlp.c_fc(L.ln_2(x))
        x = x + L.mlp.c_proj(n * 0.5 * (1 + torch.erf(n / math.sqrt(2))))
    want = a.transformer.ln_f(x) @ a.transformer.wte.weight.T
    for M, m in ((R, a), (W, b)):
        assert gap(M.subject.forward(m, tokens), want) < 1e-9
    return f"std of residual projections, 6 layers: right {stds[0]:.5f}, wrong {stds[1]:.5f}; forward equal to naive"


def p19(R, W):
    a, b = make(R), make(W)

    def want(x, mask):
        B, T, _ = x.shape
        q, k, v = (m(x).unflatten(-1, (2, 4)).transpose(1, 2) for m in (a.query, a.key, a.value))
        out = torch.zeros(B, 2, T, 4, dtype=x.dtype)
        for i in range(B):
            for h in range(2):
                for t in range(T):
                    keep = [s for s in range(t + 1) if mask[i, s]]
                    if keep:
                        z = [q[i, h, t] @ (k[i, h, s] + a.Er[a.max_len - 1 - (t - s)]) / 2 for s in keep]
                        out[i, h, t] = torch.stack(z).softmax(0) @ v[i, h, keep]
        return a.fc_out(out.transpose(1, 2).flatten(2))

    right = wrong = same = 0.0
    for T in (1, 3, 7, a.max_len):
        x = torch.randn(2, T, 8, dtype=torch.float64)
        mask = torch.ones(2, T, dtype=torch.bool)
        mask[1, T // 2 + 1 :] = False
        w = want(x, mask)
        right = max(right, gap(R.subject.forward(a, x, mask), w))
        off = gap(W.subject.forward(b, x, mask), w)
        if T == a.max_len:
            same = off
        elif T > 1:
            wrong = max(wrong, off)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    for M, m, holds in ((R, a, True), (W, b, False)):  # prefixes
        assert (gap(M.subject.forward(m, x)[:, :5], M.subject.forward(m, x[:, :5])) < 1e-9) == holds
    return verdict(right, wrong, same)


def p20(R, W):
    a, b = make(R), make(W)
    tokens = torch.randint(11, (3, 7))
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:], mask[2, 1:] = False, False
    right = wrong = 0.0
    good, bad = R.subject.forward(a, tokens, mask), W.subject.forward(b, tokens, mask)

    def twin(tokens):  # torch's own encoder layer, without padding
        x = a.embedding_norm(a.words(tokens) + a.places.weight[: tokens.shape[1]])
        block = torch.nn.TransformerEncoderLayer(8, 2, 20, 0.0, "gelu", batch_first=True).double().eval()
        for n in range(2):
            block.self_attn.in_proj_weight.data.copy_(torch.cat([m[n].weight for m in (a.q, a.k, a.v)]))
            block.self_attn.in_proj_bias.data.copy_(torch.cat([m[n].bias for m in (a.q, a.k, a.v)]))
            for theirs, mine in (
                (block.self_attn.out_proj, a.o[n]),
                (block.linear1, a.inner[n]),
                (block.linear2, a.outer[n]),
                (block.norm1, a.norms[2 * n]),
                (block.norm2, a.norms[2 * n + 1]),
            ):
                theirs.load_state_dict(mine.state_dict())
            x = block(x)
        return a.classify(x.max(1).values)

    for row, length in enumerate((7, 5, 1)):
        want = twin(tokens[row : row + 1, :length])[0]
        right = max(right, gap(good[row], want))
        if length < 7:
            wrong = max(wrong, gap(bad[row], want))
    same = max(gap(bad[0], good[0]), gap(W.subject.forward(b, tokens), R.subject.forward(a, tokens)))
    return verdict(right, wrong, same)


def smoke(M):
    """The subject as it is declared, in default sizes: it is built and runs once."""
    c = DrawnConfig()
    model, s = M.subject.build(c), M.subject
    tokens, x = torch.randint(4, c.vocab_size, (2, 5)), torch.randn(2, 5, c.d_model)
    q = torch.randn(2, c.num_heads, 5, c.d_model // c.num_heads)
    inputs = {
        "attention": (q, q, q),
        "decoder": (tokens,),
        "classifier": (tokens,),
        "encoder_decoder": (tokens, tokens),
        "position_bias": (5, 5),
        "rotary": (q, torch.arange(5)),
        "loss": (torch.randn(2, 5, c.vocab_size), tokens),
        "tokenizer": ("the fox",),
        "parameter_groups": (),
        "masking": (tokens, 0),
        "cross_attention": (x, x),
    }.get(s.kind, (x,))
    out = s.forward(model, *inputs)
    if torch.is_tensor(out):
        assert out.isfinite().all()
        if isinstance(model, torch.nn.Module) and list(model.parameters()):
            model.train()
            s.forward(model, *inputs).square().sum().backward()
            if s.kind != "feed_forward" and s.image is None:  # experts that nobody chose; what patches alone use
                assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def main():
    for number in range(1, 21):
        R, W = load(number, "right"), load(number, "wrong")
        assert W.WHAT and not hasattr(R, "WHAT") and W.subject.kind == R.subject.kind
        smoke(R)
        smoke(W)
        torch.manual_seed(number)
        said = (globals()[f"p{number:02d}"])(R, W)
        print(f"{number:02d} {R.subject.kind:17s} {said}")


if __name__ == "__main__":
    main()
