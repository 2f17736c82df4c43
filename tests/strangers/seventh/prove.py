"""For each pair: the right file satisfies what defines it (a plain reference, or an identity), the wrong file does not."""

import copy
import importlib.util
import math
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))


def load(number, which):
    name = f"pair_{number}_{which}"
    spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, f"{number}_{which}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def sizes(**changes):
    c = dict(d_model=16, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=64, num_classes=3, dropout=0.0)
    c.update(changes)
    return SimpleNamespace(**c, d_head=c["d_model"] // c["num_heads"])


def built(module, seed=0, **changes):
    torch.manual_seed(seed)
    return module.subject.build(sizes(**changes)).double().eval()


def tokens(*shape, vocab=11, seed=3, low=0):
    return torch.randint(low, vocab, shape, generator=torch.Generator().manual_seed(seed))


def gap(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a - b).abs().max().item()


# Each returns how far the file is from what defines it.


def p01(m):
    torch.manual_seed(0)
    model = m.subject.build(sizes(d_model=192, num_heads=2, num_layers=8, d_ff=768, vocab_size=50, max_len=16))
    worst = 0.0
    for name, p in model.named_parameters():
        if p.dim() == 2:
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            worst = max(worst, abs(p.std().item() / expected - 1) - 4 / math.sqrt(2 * p.numel()))
        elif name.endswith("bias"):
            worst = max(worst, p.abs().max().item())
    return max(worst, 0.0)


def p02(m):
    model, x = built(m, num_key_value_heads=1), tokens(3, 9)
    full = model(x)
    # an independent reference of the whole forward
    h = model.tok_embeddings.weight[x]

    def rms(v, n):
        return v / (v.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight

    for layer in model.layers:
        a, n = layer.attention, rms(h, layer.attention_norm)
        out = torch.zeros_like(h)
        heads = []
        for i in range(2):
            q, k, v = n @ a.wq.weight[i * 8 : i * 8 + 8].T, n @ a.wk.weight.T, n @ a.wv.weight.T
            freq = 10000.0 ** (-torch.arange(4, dtype=torch.float64) * 2 / 8)
            turn = torch.polar(torch.ones(9, 4, dtype=torch.float64), torch.outer(torch.arange(9.0, dtype=torch.float64), freq))
            q, k = (torch.complex(z[..., :4].contiguous(), z[..., 4:].contiguous()) * turn for z in (q, k))
            s = (q @ k.mH).real / math.sqrt(8)
            s = s.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
            heads.append(s.softmax(-1) @ v)
        h = h + torch.cat(heads, -1) @ a.wo.weight.T
        n, f = rms(h, layer.ffn_norm), layer.feed_forward
        h = h + (F.silu(n @ f.w1.weight.T) * (n @ f.w3.weight.T)) @ f.w2.weight.T
    assert gap(full, rms(h, model.norm) @ model.output.weight.T) < 1e-10
    return max(gap(m.subject.cache(model, list(x.split(cut, 1))), full) for cut in ([9], [1] * 9, [4, 5], [2, 3, 1, 3]))


def p03(m):
    model = built(m)
    c = sizes()
    count = sum(p.numel() for p in model.parameters())
    layer = 4 * 16 * 16 + 4 * 16 + 4 * 3 * 16 * 20 + 2 * 16
    expected = 11 * 16 * 2 + c.max_len * 16 + 2 * layer + 16
    moe = model.layers[0].block_sparse_moe
    x = torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, _, _ = moe(x)
    for b in range(2):
        for t in range(3):
            p = (moe.gate.weight @ x[b, t]).softmax(0)
            best = p.argsort(descending=True)[:2]
            z = sum(p[e] / p[best].sum() * moe.experts[int(e)](x[b, t]) for e in best)
            assert gap(z, y[b, t]) < 1e-10
    assert (count == expected) == (gap(moe.experts[0].up_proj.weight, moe.experts[1].up_proj.weight) > 0)
    return abs(count - expected)


def p04(m):
    rotate = m.RotaryEmbedding(4, 10000)
    z = torch.randn(1, 1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, _ = m.apply_rotary_pos_emb(z, z, *rotate(z, 9))
    turn = torch.arange(9, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
    want = torch.complex(z[..., :2].contiguous(), z[..., 2:].contiguous()) * torch.polar(torch.ones_like(turn), turn)
    off = gap(got, torch.cat([want.real, want.imag], -1))
    model, x = built(m), tokens(2, 7)  # relative: padding on the left shifts all positions, and changes nothing
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[:, :5] = False
    shifted = gap(model(torch.cat([tokens(2, 5, seed=9), x], 1), mask)[:, 5:], model(x))
    assert (off < 1e-9) == (shifted < 1e-9)
    return max(off, shifted)


def p05(m):
    model = built(m)
    documents = [tokens(n, low=1, seed=n) for n in (4, 2, 6, 3)]
    documents = [torch.cat([d, torch.tensor([m.EOS])]) for d in documents]
    row = torch.cat(documents)[None]
    alone = torch.cat([model(d[None]) for d in documents], 1)
    other = torch.cat([tokens(1, row.shape[1], low=1, seed=5), row])
    return max(gap(model(row), alone), gap(model(other)[1:], alone))


def p06(m):
    model, x = built(m, num_layers=3), tokens(2, 14)
    full = model(x)
    one = built(m, num_layers=1)
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    moved = (one(x) - one(changed)).abs().amax((0, 2)) > 1e-12
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]  # a window of 4
    return max(gap(m.subject.cache(model, list(x.split(cut, 1))), full) for cut in ([14], [1] * 14, [5, 3, 1, 2, 3], [6, 2, 6]))


def p07(m):
    model, x = built(m), tokens(2, 8)
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    leak = gap(model(x)[:, :5], model(changed)[:, :5])
    want = torch.tensor([[s <= t or (s < 3 and t < 3) for s in range(8)] for t in range(8)])
    assert (leak < 1e-12) == torch.equal(m.visibility(8, 3), want)
    return leak


def p08(m):
    model, x = built(m), tokens(3, 5)
    for p in model.parameters():
        p.data.mul_(1.7)
    torch.manual_seed(0)
    out, probs = m.subject.sampling(model, x, 4, temperature=0.7, top_k=3)
    worst = 0.0
    for step in range(4):
        logits = model(out[:, : 5 + step])[:, -1] / 0.7
        for b in range(3):
            kept = logits[b].argsort(descending=True)[:3]
            want = torch.zeros(11, dtype=torch.float64)
            want[kept] = logits[b, kept].softmax(0)
            worst = max(worst, gap(probs[b, step], want))
    assert m.get_slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8] and m.get_slopes(3)[2] == 2**-2
    return worst


def p09(m):
    model, x = built(m), tokens(3, 7)
    labels = tokens(3, 7, seed=8)
    labels[0, 3:] = -100
    labels[1, :2] = -100
    logits = m.subject.forward(model, x)
    terms = [-logits[b, t].log_softmax(-1)[labels[b, t + 1]] for b in range(3) for t in range(6) if labels[b, t + 1] != -100]
    assert gap(m.subject.cache(model, list(x.split([3, 1, 3], 1))), logits) < 1e-10
    return gap(m.subject.loss(model, x, labels), sum(terms) / len(terms))


def p10(m):
    model, x = built(m), tokens(2, 6)
    worst = 0.0
    for b in range(2):
        for t in range(6):
            pe = [f(t / 10000 ** (2 * i / 16)) for i in range(8) for f in (math.sin, math.cos)]
            want = model.src_embed.lut.weight[x[b, t]] * 4.0 + torch.tensor(pe, dtype=torch.float64)
            worst = max(worst, gap(model.src_embed(x)[b, t], want))
    return worst if worst > 1e-6 else 0.0  # the table was made in float32


def p11(m):
    model, source, target = built(m), tokens(2, 6), tokens(2, 5, seed=4)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    y = m.subject.forward(model, source, target, mask)
    alone = m.subject.forward(model, source[1:, :4], target[1:])
    return gap(y[1:], alone)


def p12(m):
    # Raffel et al.: half of the buckets exact, the rest logarithmic, the last one from max_distance on
    def bucket(r, both, n, far):
        base = 0
        if both:
            n //= 2
            base = n if r > 0 else 0
            r = abs(r)
        else:
            r = max(-r, 0)
        exact = n // 2
        if r < exact:
            return base + r
        edges = [exact * (far / exact) ** (i / (n - exact)) for i in range(n - exact)]
        return base + exact - 1 + sum(r >= e - 1e-9 for e in edges)

    worst = 0
    for both in (True, False):
        r = torch.arange(-40, 41)
        got = m.relative_position_bucket(r, both, 8, 16)
        worst = max(worst, *(abs(int(g) - bucket(int(i), both, 8, 16)) for i, g in zip(r, got)))
    model, source, target = built(m), tokens(2, 20), tokens(2, 9)
    table = model.encoder.relative_attention_bias.weight
    bias = model.encoder.position_bias(20, "cpu")[0]
    want = torch.stack([torch.stack([table[bucket(s - t, True, 8, 16)] for s in range(20)]) for t in range(20)])
    assert (worst == 0) == (gap(bias, want.permute(2, 0, 1)) < 1e-12)
    return worst


def p13(m):
    model, source, target = built(m), tokens(2, 6), tokens(2, 5, seed=4)
    m.causal_mask.cache_clear()
    before = m.subject.forward(model, source, target)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2:] = False
    masked = m.subject.forward(model, source, target, None, mask)
    assert gap(masked[:1, :2], m.subject.forward(model, source[:1], target[:1, :2])) < 1e-10
    return gap(m.subject.forward(model, source, target), before)


def p14(m):
    model, x = built(m), tokens(2, 6, low=2)
    ids = m.create_position_ids(torch.tensor([[False, True, True, True], [True, True, True, False]]), 1)
    off = (ids - torch.tensor([[1, 2, 3, 4], [2, 3, 4, 1]])).abs().max().item()
    turned = gap(model(x.flip(1)).flip(1), model(x))  # with positions, order matters
    assert (off == 0) == (turned > 1e-3)
    return off


def p15(m):
    model, x = built(m, num_layers=1), tokens(1, 9)
    a, e = model.layers[0].attn, model.embed(x)[0]
    wq, wk, wv = a.to_qkv.weight.split(16)
    z = torch.zeros(9, 16, dtype=torch.float64)
    for h in range(2):
        part = slice(8 * h, 8 * h + 8)
        q, k, v = e @ wq[part].T, e @ wk[part].T, e @ wv[part].T
        for i in range(9):
            rel = [max(-4, min(4, j - i)) + 4 for j in range(9)]
            s = torch.stack([q[i] @ (k[j] + a.rel_k.weight[rel[j]]) / math.sqrt(8) for j in range(9)]).softmax(0)
            z[i, part] = sum(s[j] * (v[j] + a.rel_v.weight[rel[j]]) for j in range(9))
    return gap(a(e[None])[0], z @ a.to_out.weight.T + a.to_out.bias)


def p16(m):
    model, plain, x = built(m, dropout=0.4), built(m, dropout=0.0), tokens(2, 6)
    plain.load_state_dict(model.state_dict())
    off = max(gap(model(x), plain(x)), gap(model(x), model(x)))
    model.train()
    assert gap(model(x), model(x)) > 1e-3
    return off


def p17(m):
    model, x = built(m), tokens(2, 6)
    for p in model.parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 2)
    for _, attn, _, ff in model.layers:
        attn.to_out.weight.data.zero_()
        ff.proj_out.weight.data.zero_()
    e = model.token_emb.weight[x]  # nothing is added: the stream reaches the final norm as it entered
    want = e / (e.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * model.norm.gamma
    return gap(model(x), want @ model.token_emb.weight.T + model.to_logits.bias)


def p18(m):
    model = built(m)
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, worst = m.subject.patches(model, images), 0.0
    for r in range(2):
        for c in range(3):
            pixels = images[:, :, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].reshape(2, -1)
            linear = pixels @ model.patch_embed.weight.reshape(16, -1).T + model.patch_embed.bias
            place = [f(v / 10000 ** (i / 4)) for v in (r, c) for f in (math.sin, math.cos) for i in range(4)]
            worst = max(worst, gap(got[:, 3 * r + c], linear + torch.tensor(place, dtype=torch.float64)))
    return worst if worst > 1e-6 else 0.0  # the table was made in float32


def p19(m):
    model, x = built(m), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    y = model(x, mask)
    return max(gap(y[1:], model(x[1:, :4])), gap(y[:1], model(x[:1])))


def p20(m):
    model, x = built(m), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    y = model(x, mask)
    return max(gap(y[1:], model(x[1:, :4])), gap(y[:1], model(x[:1])))


def p21(m):
    model, x = built(m), tokens(2, 7)
    other = built(m, seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    return gap(other(x), model(x))


if __name__ == "__main__":
    for i in range(1, 22):
        number = f"{i:02d}"
        with torch.no_grad():
            right, wrong = (globals()[f"p{number}"](load(number, which)) for which in ("right", "wrong"))
        print(f"{number}  right is off by {right:.1e}   wrong is off by {wrong:.3g}   ({load(number, 'right').subject.name})")
        assert right < 1e-9, number
        assert wrong > 1e-3, number
        a, b = (load(number, w).subject for w in ("right", "wrong"))
        assert a.declares == b.declares and a.kind == b.kind
