"""For every pair, in plain torch and without any check of veriformer: the right file agrees with an independent naive
computation or a known identity, and the wrong file does not. Run with a Python that has torch and veriformer:

    python prove.py
"""

import ast
import copy
import importlib.util
import io
import math
from pathlib import Path

import torch
from torch.nn import functional as F
from veriformer.properties import DrawnConfig

HERE = Path(__file__).resolve().parent
SIZES = DrawnConfig(d_model=32, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=13)
TIGHT = 1e-9


def load(number, side):
    (path,) = HERE.glob(f"{number:02d}_*_{side}.py")
    spec = importlib.util.spec_from_file_location(f"blind_{number}_{side}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(number, config=SIZES):
    """(module, subject, model) of each side; the models have the same weights and are in float64 and in eval."""
    sides = {}
    for side in ("right", "wrong"):
        module = load(number, side)
        torch.manual_seed(number)
        model = module.subject.build(config)
        if isinstance(model, torch.nn.Module):
            for p in model.parameters():
                p.data.add_(0.3 * torch.randn(p.shape))
            model = model.double().eval()
        sides[side] = (module, module.subject, model)
    return sides


def gap(a, b):
    return float((a - b).detach().abs().max())


def said(number, right, wrong, text, least=1e-3):
    """right and wrong are distances from what is independently expected."""
    ok = right <= TIGHT and wrong >= least
    print(f"{'ok ' if ok else 'BAD'} {number:02d}  right {right:.1e}  wrong {wrong:.1e}  {text}")
    assert ok, number


def tokens(batch, length, seed=0, vocab=13):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(vector, position, base, interleaved=False):
    """One vector turned by complex numbers, pair by pair."""
    n = len(vector)
    out = torch.empty_like(vector)
    for i in range(n // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + n // 2)
        z = complex(float(vector[a]), float(vector[b])) * complex(
            math.cos(position * base ** (-2 * i / n)), math.sin(position * base ** (-2 * i / n))
        )
        out[a], out[b] = z.real, z.imag
    return out


def slow_attention(q, k, v, scale, visible, cap=None):
    """q [H, T, K], k and v [G, S, K], loops; visible(t, s) says what query t may see."""
    H, T, _ = q.shape
    repeats = H // k.shape[0]
    out = torch.zeros(H, T, v.shape[-1], dtype=q.dtype)
    for h in range(H):
        for t in range(T):
            seen = [s for s in range(k.shape[1]) if visible(t, s)]
            scores = torch.stack([q[h, t] @ k[h // repeats, s] for s in seen]) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            weights = scores.exp() / scores.exp().sum()
            out[h, t] = sum(w * v[h // repeats, s] for w, s in zip(weights, seen))
    return out


def turn_all(x, base, interleaved=False):
    return torch.stack([torch.stack([turned(row, t, base, interleaved) for t, row in enumerate(head)]) for head in x])


def heads(x, number):
    return x.view(x.shape[0], number, -1).transpose(0, 1)


def causal(t, s):
    return s <= t


@torch.no_grad()
def p01():
    def naive(m, ids):
        x = m.embed_tokens.weight[ids]
        for layer in m.layers:
            a, h = layer.self_attn, rms(x, layer.input_layernorm.weight, 1e-6)
            q, k, v = heads(a.q_proj(h), 4), heads(a.k_proj(h), 2), heads(a.v_proj(h), 2)
            y = slow_attention(turn_all(q, 1e4), turn_all(k, 1e4), v, 8**-0.5, causal)
            x = x + a.o_proj(y.transpose(0, 1).flatten(1))
            h = rms(x, layer.post_attention_layernorm.weight, 1e-6)
            g = layer.mlp.gate_proj(h)
            x = x + layer.mlp.down_proj(g * torch.sigmoid(g) * layer.mlp.up_proj(h))
        return m.lm_head(rms(x, m.norm.weight, 1e-6))

    ids, sides = tokens(1, 6), both(1)
    expected = naive(sides["right"][2], ids[0])
    out = {s: x[1].forward(x[2], ids)[0] for s, x in sides.items()}
    said(1, gap(out["right"], expected), gap(out["wrong"], expected), "naive Llama, turned by complex numbers")
    # identity: scores depend on distances alone, so padding on the left changes nothing
    left = torch.cat((tokens(1, 3, 1), ids), 1)
    mask = torch.tensor([[False] * 3 + [True] * 6])
    moved = {s: gap(x[1].forward(x[2], left, mask)[:, 3:], x[1].forward(x[2], ids)) for s, x in sides.items()}
    said(1, moved["right"], moved["wrong"], "shift by left padding changes nothing")


@torch.no_grad()
def cached_equals_full(number, splits, text, config=SIZES, least=1e-3):
    sides = both(number, config)
    ids = tokens(2, sum(splits))
    distance = {
        s: gap(x[1].cache(x[2], list(ids.split(list(splits), 1))), x[1].forward(x[2], ids)) for s, x in sides.items()
    }
    full = [x[1].forward(x[2], ids) for x in sides.values()]
    assert torch.equal(*full), "without a cache the two are the same"
    said(number, distance["right"], distance["wrong"], text, least)
    return sides


@torch.no_grad()
def p02():
    sides = cached_equals_full(2, (4, 1, 2, 1), "cached chunks 4, 1, 2, 1 are the whole sequence")
    _, s, m = sides["right"]
    ids = tokens(1, 5)[0]
    x = m.embed.weight[ids]
    for layer in m.layers:
        a, h = layer.self_attn, rms(x, layer.input_layernorm.weight, 1e-6)
        q, k, v = heads(a.q_proj(h), 4), heads(a.k_proj(h), 2), heads(a.v_proj(h), 2)
        q, k = rms(q, a.q_norm.weight, 1e-6), rms(k, a.k_norm.weight, 1e-6)
        y = slow_attention(turn_all(q, 1e6), turn_all(k, 1e6), v, 8**-0.5, causal)
        x = x + a.o_proj(y.transpose(0, 1).flatten(1))
        g, u = layer.gate_up(rms(x, layer.post_attention_layernorm.weight, 1e-6)).chunk(2, -1)
        x = x + layer.down(g * torch.sigmoid(g) * u)
    assert gap(m.lm_head(rms(x, m.norm.weight, 1e-6)), s.forward(m, ids[None])[0]) < TIGHT


@torch.no_grad()
def p03():
    def naive(m, ids):
        x = m.embed_tokens.weight[ids] * math.sqrt(32)
        for layer in m.layers:
            a = layer.self_attn
            qkv = a.qkv_proj(rms(x, 1 + layer.pre_attn.weight, 1e-6))
            q, k, v = heads(qkv[:, :32], 4), heads(qkv[:, 32:48], 2), heads(qkv[:, 48:], 2)
            y = slow_attention(turn_all(q, 1e4), turn_all(k, 1e4), v, 8**-0.5, causal, cap=15.0)
            x = x + rms(a.o_proj(y.transpose(0, 1).flatten(1)), 1 + layer.post_attn.weight, 1e-6)
            h = rms(x, 1 + layer.pre_ffn.weight, 1e-6)
            g = layer.gate_proj(h)
            g = 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
            x = x + rms(layer.down_proj(g * layer.up_proj(h)), 1 + layer.post_ffn.weight, 1e-6)
        return 30 * torch.tanh(rms(x, 1 + m.norm.weight, 1e-6) @ m.embed_tokens.weight.T / 30)

    ids, sides = tokens(1, 6), both(3)
    expected = naive(sides["right"][2], ids[0])
    out = {s: x[1].forward(x[2], ids)[0] for s, x in sides.items()}
    said(3, gap(out["right"], expected), gap(out["wrong"], expected), "naive Gemma 2: 15 tanh(q k / sqrt(d) / 15)")


@torch.no_grad()
def p04():
    def naive(m, ids):
        pe = torch.tensor(
            [[(math.sin, math.cos)[i % 2](t / 10000 ** (i // 2 * 2 / 32)) for i in range(32)] for t in range(len(ids))],
            dtype=torch.float64,
        )
        x = m.embed.weight[ids] * math.sqrt(32) + pe
        for layer in m.layers:
            q, k, v = (heads(p, 4) for p in layer.attention.in_proj(x).chunk(3, -1))
            y = slow_attention(q, k, v, 8**-0.5, lambda t, s: True)
            x = layer.norm1(x + layer.attention.out_proj(y.transpose(0, 1).flatten(1)))
            x = layer.norm2(x + layer.feed_forward(x))
        return x

    ids, sides = tokens(1, 6), both(4)
    expected = naive(sides["right"][2], ids[0])
    out = {s: x[1].forward(x[2], ids)[0] for s, x in sides.items()}
    said(4, gap(out["right"], expected), gap(out["wrong"], expected), "naive encoder: sqrt(d) E + PE")


@torch.no_grad()
def p05():
    x, distance = normal(2, 5, 32), {}
    for side in ("right", "wrong"):
        s = load(5, side).subject
        fresh = s.build(SIZES).double()
        distance[side] = gap(s.forward(fresh, x), F.rms_norm(x, (32,), eps=1e-6))
    said(5, distance["right"], distance["wrong"], "a fresh norm is torch's rms_norm without a gain")
    (_, s, m) = both(5)["right"]
    assert gap(s.forward(m, x), rms(x, 1 + m.weight, 1e-6)) < TIGHT


@torch.no_grad()
def p06():
    x, sides = normal(2, 5, 32), both(6)
    m = sides["right"][2]
    expected = torch.zeros(10, 32, dtype=torch.float64)
    for n, row in enumerate(x.reshape(10, 32)):
        p = torch.softmax(m.router.weight @ row, 0)
        best = sorted(range(4), key=lambda e: -float(p[e]))[:2]
        for e in best:
            h = m.experts.gate_up_proj[e] @ row
            g, u = h[:24], h[24:]
            expected[n] += p[e] / sum(p[b] for b in best) * (m.experts.down_proj[e] @ (g * torch.sigmoid(g) * u))
    out = {s: y[1].forward(y[2], x).reshape(10, 32) for s, y in sides.items()}
    said(6, gap(out["right"], expected), gap(out["wrong"], expected), "loop over tokens and their two experts")
    sums = {s: gap(y[1].router(y[2], x).sum(-1), torch.ones(2, 5).double()) for s, y in sides.items()}
    said(6, sums["right"], sums["wrong"], "the gates of a token sum to one")


@torch.no_grad()
def p07():
    sides = both(7)
    worst = {"right": 0.0, "wrong": 0.0}
    for T, S in ((5, 7), (16, 16), (17, 33), (40, 31), (1, 50)):
        q, k, v = normal(2, 4, T, 8), normal(2, 2, S, 8, seed=1), normal(2, 2, S, 6, seed=2)
        seen = torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(3)) < 0.6
        for mask in (None, seen):
            for is_causal in (False, True):
                allowed = torch.ones(T, S, dtype=torch.bool)
                if is_causal:
                    allowed = allowed.tril(S - T)
                allowed = allowed if mask is None else allowed & mask
                scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
                weights = torch.nan_to_num(scores.masked_fill(~allowed, -torch.inf).softmax(-1))
                expected = weights @ v.repeat_interleave(2, 1)
                for side, (_, s, m) in sides.items():
                    d = gap(s.forward(m, q, k, v, attention_mask=mask, causal=is_causal), expected)
                    worst[side] = max(worst[side], d)
                    if side == "wrong" and (S % 16 == 0 or mask is not None):
                        assert d < TIGHT, "whole blocks and masked calls are right in both"
    said(7, worst["right"], worst["wrong"], "plain softmax, lengths that are no multiple of 16")


@torch.no_grad()
def p08():
    def bucket(relative):
        """In integers: of 16 buckets a side, 8 exact, then 8 + floor(8 log(d / 8) / log 16) = floor(2 log2(d / 8))."""
        d = abs(relative)
        b = d if d < 8 else min(15, 8 + max(i for i in range(64) if 2**i * 64 <= d * d))
        return b + (16 if relative > 0 else 0)

    sides, length = both(8), 200
    table = sides["right"][2].relative_attention_bias.weight
    rows = torch.tensor([[bucket(s - t) for s in range(length)] for t in range(length)])
    out = {s: x[1].forward(x[2], length, length) for s, x in sides.items()}
    expected = table[rows].permute(2, 0, 1)
    said(8, gap(out["right"], expected), gap(out["wrong"], expected), "buckets in whole numbers, lengths to 200")
    short = {s: gap(y[:, :12, :12], expected[:, :12, :12]) for s, y in out.items()}
    said(8, short["right"], short["wrong"], "lengths of 12 show it")
    assert torch.equal(out["wrong"][:, 0, 16], out["wrong"][:, 0, 199])
    assert not torch.equal(expected[:, 0, 16], expected[:, 0, 199])


def p09():
    text = "the weather withers; the newest towers need all the theory of it, über 3 shells  she sells\n"
    distance = {}
    for side, (_, s, m) in both(9).items():
        ids = s.forward(m, text)
        vocabulary, merges = s.vocabulary(m), s.merges(m)
        slow = []
        for parts in s.words(m, text):
            for a, b in merges:  # in the order in which they were learnt, each over the whole word
                i = 0
                while i + 1 < len(parts):
                    if (parts[i], parts[i + 1]) == (a, b):
                        parts = [*parts[:i], a + b, *parts[i + 2 :]]
                    i += 1
            slow += [vocabulary[part] for part in parts]
        assert s.decode(m, ids) == text and s.decode(m, slow) == text
        distance[side] = float(ids != slow)
    said(9, distance["right"], distance["wrong"], "the merges replayed in the order in which they were learnt")


@torch.no_grad()
def padded(number, text, right_side=True):
    """A batch of different lengths, padded on the right, gives each sample what it gives alone."""
    lengths, out = (6, 3, 4), {}
    for side, (_, s, m) in both(number).items():
        ids = tokens(3, 6)
        mask = torch.stack([torch.arange(6) < n for n in lengths])
        alone = torch.cat([s.forward(m, ids[b : b + 1, :n]) for b, n in enumerate(lengths)])
        out[side] = gap(s.forward(m, ids, mask), alone)
    said(number, out["right"], out["wrong"], text)


@torch.no_grad()
def p10():
    padded(10, "each sample of a padded batch gives what it gives alone")
    for side, (_, s, m) in both(10).items():
        ids = tokens(1, 6)
        one = gap(s.forward(m, ids, torch.tensor([[True] * 4 + [False] * 2])), s.forward(m, ids[:, :4]))
        assert one < TIGHT, (side, "a batch of one is right in both")
    m = both(10)["right"][2]
    layer = m.layers[0].attention
    x = normal(1, 5, 32)
    q, k, v = (heads(p(x[0]), 4) for p in (layer.query, layer.key, layer.value))
    y = layer.dense(slow_attention(q, k, v, 8**-0.5, lambda t, s: True).transpose(0, 1).flatten(1))
    assert gap(layer(x, None)[0], y) < TIGHT


@torch.no_grad()
def p11():
    logits, labels = normal(2, 7, 13), tokens(2, 7)
    labels[0, 3:] = -100
    labels[1, 6] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    d = {s: gap(x[1].forward(x[2], logits, labels), expected) for s, x in both(11).items()}
    said(11, d["right"], d["wrong"], "torch's cross_entropy with labels of -100")
    full = tokens(2, 6)
    for _, s, m in both(11).values():
        assert gap(s.forward(m, logits[:, :6], full), F.cross_entropy(logits[:, :6].flatten(0, 1), full.flatten())) < TIGHT
        assert float(s.forward(m, logits, torch.full_like(labels, -100))) == 0


@torch.no_grad()
def p12():
    d, ids = {}, tokens(2, 6)
    for side, (_, s, m) in both(12).items():
        file = io.BytesIO()
        torch.save(m.state_dict(), file)
        file.seek(0)
        torch.manual_seed(77)
        fresh = s.build(SIZES).double().eval()
        fresh.load_state_dict(torch.load(file), strict=True)
        d[side] = gap(s.forward(fresh, ids), s.forward(m, ids))
        angles = 2 * math.pi * torch.arange(4).double()[:, None] * m.positions.gaussian
        assert gap(m.positions(4), torch.cat((angles.sin(), angles.cos()), -1)) < TIGHT
    said(12, d["right"], d["wrong"], "saved and loaded into a fresh model it gives the same")
    outs = [x[1].forward(x[2], ids) for x in both(12).values()]
    assert torch.equal(*outs), "the forwards are the same"


@torch.no_grad()
def p13():
    config, x, positions = DrawnConfig(d_model=16, num_heads=2), normal(1, 2, 5, 8), torch.tensor([0, 3, 1, 9, 20])
    expected = x.clone()
    for h in range(2):
        for t, p in enumerate(positions.tolist()):
            expected[0, h, t, :4] = turned(x[0, h, t, :4], p, 1e4)
    d = {s: gap(y[1].forward(y[2], x, positions), expected) for s, y in both(13, config).items()}
    said(13, d["right"], d["wrong"], "four of eight channels turned by complex numbers, base^(-2i/4)")


@torch.no_grad()
def p14():
    sides = cached_equals_full(14, (3, 2, 5, 1, 1), "cached chunks 3, 2, 5, 1, 1 are the whole sequence, window 4")
    ids = tokens(2, 9)
    for _, s, m in sides.values():
        assert gap(s.cache(m, list(ids.split(1, 1))), s.forward(m, ids)) < TIGHT, "single tokens are right in both"
    m, s = sides["right"][2], sides["right"][1]
    x = m.tok_embeddings.weight[ids[0]]
    for layer in m.layers:
        a, h = layer.attention, rms(x, layer.attention_norm.weight, 1e-5)
        q, k, v = heads(a.wq(h), 4), heads(a.wk(h), 2), heads(a.wv(h), 2)
        q, k = turn_all(q, 1e4, True), turn_all(k, 1e4, True)
        y = slow_attention(q, k, v, 8**-0.5, lambda t, j: t - 4 < j <= t)
        x = x + a.wo(y.transpose(0, 1).flatten(1))
        h = rms(x, layer.ffn_norm.weight, 1e-5)
        g = layer.w1(h)
        x = x + layer.w2(g * torch.sigmoid(g) * layer.w3(h))
    assert gap(m.output(rms(x, m.norm.weight, 1e-5)), s.forward(m, ids[:1])[0]) < TIGHT


@torch.no_grad()
def p15():
    x, sides = normal(1, 6, 32), both(15)
    m = sides["right"][2]
    q, k, v = (p(x[0]).view(6, -1, 8).transpose(0, 1) for p in (m.q_proj, m.k_proj, m.v_proj))
    y = torch.zeros(4, 6, 8, dtype=torch.float64)
    for h in range(4):
        for t in range(6):  # the sink is one more logit whose value is zero
            logits = torch.cat([(k[h // 2, : t + 1] @ q[h, t]) / math.sqrt(8), m.sinks[h : h + 1]])
            y[h, t] = logits.softmax(0)[:-1] @ v[h // 2, : t + 1]
    expected = m.o_proj(y.transpose(0, 1).reshape(6, 32))
    out = {s: z[1].forward(z[2], x)[0] for s, z in sides.items()}
    said(15, gap(out["right"], expected), gap(out["wrong"], expected), "softmax over the scores and one sink logit")
    changed = x.clone()
    changed[:, 5] += 1
    moved = {s: gap(z[1].forward(z[2], changed)[:, :5], z[1].forward(z[2], x)[:, :5]) for s, z in sides.items()}
    said(15, moved["right"], moved["wrong"], "the last input does not reach earlier outputs")


def p16():
    sides = cached_equals_full(16, (4, 1, 1, 1), "single cached tokens are the whole sequence")
    with torch.no_grad():
        for _, s, m in sides.values():
            ids = tokens(2, 7)
            assert gap(s.cache(m, [ids[:, :3], ids[:, 3:5], ids[:, 5:]]), s.forward(m, ids)) < TIGHT, "chunks are right"
        m, a = sides["right"][2], sides["right"][2].h[0].attn
        x = normal(1, 5, 32)
        kv = a.wkv(x[0]).view(5, 2, 2, 8)
        y = slow_attention(heads(a.wq(x[0]), 4), kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1), 8**-0.5, causal)
        assert gap(a(x, None)[0][0], a.wo(y.transpose(0, 1).flatten(1))) < TIGHT


@torch.no_grad()
def p17():
    sides, source, target = both(17), tokens(3, 6), tokens(3, 4, 1)
    lengths, d = (6, 3, 4), {}
    mask = torch.stack([torch.arange(6) < n for n in lengths])
    for side, (_, s, m) in sides.items():
        alone = [s.forward(m, source[b : b + 1, :n], target[b : b + 1]) for b, n in enumerate(lengths)]
        d[side] = gap(s.forward(m, source, target, source_mask=mask), torch.cat(alone))
    said(17, d["right"], d["wrong"], "a padded source gives what the source alone gives")
    outs = [s.forward(m, source, target) for _, s, m in sides.values()]
    assert torch.equal(*outs), "without padding the two are the same"
    m = sides["right"][2]
    cross = m.decoder[0].cross_attn
    x, memory = normal(1, 4, 32), normal(1, 6, 32, seed=1)
    q, k, v = heads(cross.q_proj(x[0]), 4), heads(cross.k_proj(memory[0]), 4), heads(cross.v_proj(memory[0]), 4)
    y = cross.out_proj(slow_attention(q, k, v, 8**-0.5, lambda t, s: True).transpose(0, 1).flatten(1))
    assert gap(cross(x, memory)[0], y) < TIGHT


@torch.no_grad()
def p18():
    images, sides = normal(2, 3, 8, 12), both(18)
    m = sides["right"][2]
    conv = F.conv2d(images, m.patch_embed.proj.weight.view(32, 3, 4, 4), m.patch_embed.proj.bias, stride=4)
    expected = conv.flatten(2).transpose(1, 2) + m.pos_embed
    d = {s: gap(x[1].patches(x[2], images)[:, 3:], expected) for s, x in sides.items()}
    said(18, d["right"], d["wrong"], "a convolution of stride 4 with the same weights")
    changed = images.clone()
    changed[:, :, :4, :4] += 1  # the first patch
    reached = {}
    for side, (_, s, m) in sides.items():
        moved = (s.patches(m, changed) - s.patches(m, images)).abs().amax((0, 2)) > 1e-9
        reached[side] = float(moved.sum() - 1)
    said(18, reached["right"], reached["wrong"], "one patch of the image reaches one token (tokens too many)")


@torch.no_grad()
def p19():
    config, ids, d = DrawnConfig(d_model=16, num_heads=2, dropout=0.3), tokens(2, 6, vocab=11), {}
    sides = both(19, config)
    m = sides["right"][2]
    x = m.norm(m.tok_embeddings.weight[ids[0]])
    for layer in m.layers:
        qkv = layer.attn.Wqkv(layer.attn_norm(x))
        q, k, v = (heads(p, 2) for p in qkv.chunk(3, -1))
        y = slow_attention(turn_all(q, 160000.0), turn_all(k, 160000.0), v, 8**-0.5, lambda t, s: True)
        x = x + layer.attn.Wo(y.transpose(0, 1).flatten(1))
        value, gate = layer.mlp.Wi(layer.mlp_norm(x)).chunk(2, -1)
        x = x + layer.mlp.Wo(0.5 * value * (1 + torch.erf(value / math.sqrt(2))) * gate)
    expected = m.final_norm(x)
    d = {s: gap(z[1].forward(z[2], ids)[0], expected) for s, z in sides.items()}
    said(19, d["right"], d["wrong"], "naive ModernBERT in eval, dropout 0.3")
    twice = {s: gap(z[1].forward(z[2], ids), z[1].forward(z[2], ids)) for s, z in sides.items()}
    said(19, twice["right"], twice["wrong"], "two calls in eval give the same")


def p20():
    ids, d, grads = tokens(2, 6), {}, {}
    for side in ("right", "wrong"):
        s = load(20, side).subject
        torch.manual_seed(20)
        m = s.build(SIZES)
        assert torch.equal(m.lm_head.weight, m.wte.weight), "in both the numbers are the same"
        tables = sum(tuple(p.shape) == (13, 32) for p in m.parameters())
        assert tables == {"right": 1, "wrong": 2}[side]
        m = m.double().eval()
        with torch.no_grad():
            m.wte.weight.mul_(1.5)
        d[side] = gap(m.lm_head.weight, m.wte.weight)
        m = s.build(SIZES).double().eval()
        F.cross_entropy(s.forward(m, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        # a functional copy with one leaf for both uses
        leaf = m.wte.weight.detach().clone().requires_grad_()
        weights = {**dict(copy.deepcopy(m).named_parameters(remove_duplicate=False)), "wte.weight": leaf, "lm_head.weight": leaf}
        weights = {k: w if w is leaf else w.detach() for k, w in weights.items()}
        out = torch.func.functional_call(m, weights, (ids[:, :-1],), tie_weights=False)
        (total,) = torch.autograd.grad(F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()), leaf)
        grads[side] = gap(m.wte.weight.grad, total)
    said(20, d["right"], d["wrong"], "in float64 a change of the embedding is one of the head")
    said(20, grads["right"], grads["wrong"], "the gradient is that of both uses of the one table")
    _, s, m = both(20)["right"]
    with torch.no_grad():
        x = m.wte.weight[ids[0]] + m.wpe.weight[:6]
        for b in m.h:
            q, k, v = (heads(p, 4) for p in b.attn.c_attn(b.ln_1(x)).chunk(3, -1))
            x = x + b.attn.c_proj(slow_attention(q, k, v, 8**-0.5, causal).transpose(0, 1).flatten(1))
            h = b.c_fc(b.ln_2(x))
            x = x + b.c_proj(0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))))
        assert gap(s.forward(m, ids[:1])[0], m.ln_f(x) @ m.wte.weight.T) < TIGHT


def p00():
    """Every file builds with DrawnConfig() and runs; pairs differ in the told line and its neighbours alone."""
    files = sorted(HERE.glob("[0-9][0-9]_*_right.py"))
    assert len(files) == 20
    for path in files:
        other = Path(str(path).replace("_right", "_wrong"))
        right, wrong = path.read_text().splitlines(), other.read_text().splitlines()
        what = ast.literal_eval(wrong[0].removeprefix("WHAT = "))
        wrong = wrong[2:]
        assert len(set(right) ^ set(wrong)) <= 6 and "(line " in what, path
        for side in ("right", "wrong"):
            run_default(int(path.name[:2]), side)
    print("ok  00  40 files build with DrawnConfig() and run")


@torch.no_grad()
def run_default(number, side):
    s, c = load(number, side).subject, DrawnConfig()
    m = s.build(c)
    ids, x = tokens(2, 5, vocab=c.vocab_size), torch.randn(2, 5, c.d_model)
    inputs = {
        "decoder": (ids,), "encoder": (ids,), "classifier": (ids,), "encoder_decoder": (ids, ids[:, :3]),
        "norm": (x,), "feed_forward": (x,), "self_attention": (x,), "attention": (torch.randn(2, 2, 5, 4),) * 3,
        "position_bias": (4, 6), "loss": (torch.randn(2, 5, 11), ids), "tokenizer": ("the weather",),
        "rotary": (torch.randn(2, 2, 5, c.d_head), torch.arange(5)),
    }[s.kind]  # fmt: skip
    y = s.forward(m, *((x,) if s.inputs == "embeddings" else inputs))
    assert y if s.kind == "tokenizer" else bool(torch.isfinite(y).all())
    if s.cache:
        assert s.cache(m, [ids[:, :2], ids[:, 2:]]).shape == s.forward(m, ids).shape
    if s.patches:
        assert s.patches(m, torch.randn(2, *s.image)).shape[-1] == c.d_model
    if s.router:
        assert s.router(m, x).shape[:2] == x.shape[:2]


if __name__ == "__main__":
    p00()
    for number in range(1, 21):
        globals()[f"p{number:02d}"]()
    print("all 20 pairs are as told")
