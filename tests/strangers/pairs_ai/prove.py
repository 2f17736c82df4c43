"""Each wrong file is wrong and each right one right, in plain torch: `python prove.py`."""

import copy
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent


def load(number, side):
    path = next(HERE.glob(f"{number:02}_*_{side}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def build(module, seed=0, noise=True, **sizes):
    given = dict(d_model=16, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=11, max_len=32, num_classes=3, dropout=0.0, d_head=8)
    torch.manual_seed(seed)
    model = module.subject.build(SimpleNamespace(**(given | sizes))).double().eval()
    if noise:  # as after training: no gain is one, no bias zero, no weight tiny
        for p in dict.fromkeys(model.parameters()):
            p.data += 0.3 * torch.randn_like(p)
    return model


def tokens(*shape, seed=1):
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.allclose(a, b, rtol=1e-7, atol=1e-8)


def keeps_prefix(f, lengths=range(2, 10)):
    """The outputs for each prefix are the first ones for the whole."""
    x = tokens(2, 9)
    return all(same(f(x)[:, : t], f(torch.cat((x[:, :t], tokens(2, 9, seed=7)[:, t:n]), 1))[:, :t]) for n in (9,) for t in range(1, n)) and all(
        same(f(x[:, :n])[:, :t], f(x[:, :t])) for n in lengths for t in range(1, n)
    )


def p01(m):
    model, x = build(m), tokens(4, 5)
    torch.manual_seed(3)
    drawn, probs = m.subject.sampling(model, x, 12, temperature=1.3, top_k=3)
    picked = probs.gather(-1, drawn[:, 5:, None])
    ok = bool((picked > 0).all()) and bool(((probs > 0).sum(-1) == 3).all())
    for s in range(12):  # what it was drawn from is the model's top 3
        logits = model(drawn[:, : 5 + s])[:, -1] / 1.3
        kept = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -math.inf).softmax(-1)
        assert same(kept, probs[:, s])
    return ok


def p02(m):
    model = build(m)
    one = model.decoder.weight is model.word_embeddings.weight
    two = copy.deepcopy(model)
    optimizer = torch.optim.Adam(two.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(two(tokens(4, 6)).flatten(0, 1), tokens(4, 6).flatten()).backward()
        optimizer.step()
    trained = torch.equal(two.decoder.weight, two.word_embeddings.weight)
    # one Adam step from fresh, in place, against a step by hand with the summed gradient
    three, w = build(m), None
    w = three.word_embeddings.weight.detach().clone()
    F.cross_entropy(three(tokens(4, 6)).flatten(0, 1), tokens(4, 6).flatten()).backward()
    g = three.word_embeddings.weight.grad
    if three.decoder.weight is not three.word_embeddings.weight:
        g = g + three.decoder.weight.grad
    torch.optim.Adam(three.parameters(), lr=0.01).step()
    stepped = same(three.word_embeddings.weight, w - 0.01 * g / (g.abs() + 1e-8))
    assert one == trained == stepped
    return one


def p03(m):
    # by definition of causal T5 buckets: nearer than half the buckets, each distance has a bucket of its own
    model = build(m)
    bias = model.decoder.bias(6)
    t5 = torch.stack([bias[:, 5, 5 - d] for d in range(4)], 1)
    distinct = same(t5, model.decoder.bias.table.weight[:4].T)
    # and what is seen: exchanging two past targets moves the last output of one layer
    single, source, target = build(m, num_layers=1), tokens(2, 4), torch.tensor([[1, 2, 3, 4]])
    out = single(source[:1], target)[:, -1]
    swapped = single(source[:1], target[:, [1, 0, 2, 3]])[:, -1]
    assert distinct != same(out, swapped)
    return distinct


def p04(m):
    e = build(m).src_embed
    x = tokens(2, 7)
    pos, i = torch.arange(7, dtype=torch.float64)[:, None], torch.arange(0, 16, 2, dtype=torch.float64)
    angle = pos / 10000 ** (i / 16)
    pe = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    return torch.allclose(e(x), e.lut(x) * 4 + pe, atol=1e-5)


def p05(m):
    model = build(m)
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    kernel = model.embed.weight.view(-1, 3, 4, 4)
    reference = F.conv2d(images, kernel, model.embed.bias, stride=4).flatten(2).transpose(1, 2) + model.pos_embed
    return same(model.tokens(images)[:, 1:], reference)


def p06(m):
    model, x = build(m, num_heads=4, num_key_value_heads=2), tokens(2, 13)
    full = model(x)
    assert same(model.decode(x.split(1, 1)), full)  # token by token both are right
    return all(same(model.decode(x.split(s, 1)), full) for s in ([3, 2, 8], [13], [1, 6, 6]))


def p07(m):
    moe, x = build(m).blocks[0].moe, torch.randn(3, 7, 16, dtype=torch.float64)
    probs = moe.gate(x).softmax(-1)
    kept = probs * (probs >= probs.topk(2).values[..., -1:])
    kept = kept / kept.sum(-1, keepdim=True)
    reference = sum(kept[..., e : e + 1] * expert(x) for e, expert in enumerate(moe.experts))
    model, t = build(m), tokens(3, 6)
    independent = same(model(t)[:1], model(t[:1]))
    assert same(moe(x), reference) == independent
    return independent


def p08(m):
    model = build(m, noise=False, d_model=64, d_ff=256, num_layers=8)
    stds = [p.std().item() for n, p in model.named_parameters() if n.endswith("c_proj.weight")]
    others = [p.std().item() for n, p in model.named_parameters() if n.endswith(("c_fc.weight", "c_attn.weight"))]
    assert all(abs(s / 0.02 - 1) < 0.1 for s in others)
    return all(abs(s / (0.02 / 4) - 1) < 0.1 for s in stds)


def p09(m):
    model = build(m)  # heads of 8, 4 channels rotated
    attention = model.layers[0].attention
    cos, sin = attention.rotary_emb(torch.zeros(1, 2, 9, 8, dtype=torch.float64))
    t = torch.arange(9, dtype=torch.float64)
    angles = torch.stack((t, t / 10000**0.5, t, t / 10000**0.5), 1)
    return torch.allclose(cos, angles.cos(), atol=1e-6) and torch.allclose(sin, angles.sin(), atol=1e-6)


def p10(m):
    ok = []
    for heads in (2, 3):
        model = build(m, num_heads=heads, d_model=24)
        attention = model.h[0].self_attention
        x = torch.randn(2, 6, 24, dtype=torch.float64)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1).expand(2, 1, 6, 6)
        d = 24 // heads
        q, k, v = attention.query_key_value(x).view(2, 6, heads, 3, d).permute(3, 0, 2, 1, 4)
        slopes = torch.tensor({2: [1 / 16, 1 / 256], 3: [1 / 16, 1 / 256, 1 / 4]}[heads], dtype=torch.float64)
        i = torch.arange(6)
        bias = -slopes[:, None, None] * (i[:, None] - i[None, :])
        bias = bias.masked_fill(hidden[0], -math.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(2, -1, -1, -1))
        ok.append(same(attention(x, model.build_alibi(2, 6, x), hidden), attention.dense(out.transpose(1, 2).flatten(2))))
    assert ok[0] == ok[1]
    return ok[0]


def p11(m):
    model, x = build(m), tokens(3, 5)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, :3], mask[1, :1] = False, False
    order = torch.tensor([2, 0, 0])
    tail = tokens(3, 3, seed=9)
    out = m.subject.cache(model, [x, tail[:, :1], tail[:, 1:]], mask, order)
    whole = model(torch.cat((x[order], tail), 1), mask[order])
    straight = m.subject.cache(model, [x, tail], mask)
    assert same(straight[mask], model(torch.cat((x, tail), 1), mask)[mask])
    return same(out[:, 5:], whole[:, 5:])


def padded_equal(model, x, fill):
    mask = torch.ones(x.shape[0], x.shape[1] + 3, dtype=torch.bool)
    mask[:, x.shape[1] :] = False
    return model(torch.cat((x, fill), 1), mask)


def p12(m):
    model, x = build(m), tokens(4, 5)
    hidden, mask = torch.randn(4, 6, 16, dtype=torch.float64), torch.tensor([[1, 1, 1, 0, 0, 0]] * 4, dtype=torch.bool)
    pooled = same(model.pool(hidden, mask), hidden[:, :3].amax(1))
    assert pooled == same(padded_equal(model, x, tokens(4, 3)), model(x))
    return pooled


def p13(m):
    model, x = build(m), tokens(2, 5)
    a, b = padded_equal(model, x, tokens(2, 3))[:, :5], padded_equal(model, x, tokens(2, 3, seed=5))[:, :5]
    assert same(a, b) == same(a, model(x))
    return same(a, b)


def p14(m):
    q, k, v = (torch.randn(2, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    fq, fk = F.elu(q) + 1, F.elu(k) + 1
    weights = (fq @ fk.mT).tril()
    reference = (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v
    prefix = keeps_prefix(build(m))
    assert same(m.causal_linear_attention(q, k, v), reference) == prefix
    return prefix


def p15(m):
    model, x = build(m), tokens(2, 9)
    full = model(x)
    # the parallel form by its definition, one head at a time
    r = model.blocks[0].retention
    h = torch.randn(1, 5, 16, dtype=torch.float64)
    q, k, v = r.project(h)
    y = torch.zeros_like(v)
    for head in range(2):
        g, s = 1 - 2.0 ** (-2 - head), torch.zeros(8, 8, dtype=torch.float64)
        for t in range(5):
            s = g * s + k[0, head, t, :, None] * v[0, head, t, None, :]
            y[0, head, t] = q[0, head, t] @ s
    assert same(r(h), r.finish(h, y))
    return all(same(model.recurrent(x.split(n, 1)), full) for n in (1, 4, [2, 1, 6]))


def p16(m):
    model, x = build(m), torch.randn(2, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().mean().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(x)
    assert same(model(x), copy.deepcopy(model)(x))
    fresh = build(m, seed=5)
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        return same(evaluated, fresh(x))


def p17(m):
    model = build(m)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    attention = model.layers[0].self_attn
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in attention.qkv_proj(x).chunk(3, -1))
    scores = m.apply_rotary_emb(q) @ m.apply_rotary_emb(k).mT / 8**0.5
    weights = (5 * (scores / 5).tanh()).masked_fill(hidden, -math.inf).softmax(-1)
    reference = attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
    prefix = keeps_prefix(model)
    assert same(attention(x, hidden), reference) == prefix
    return prefix


def p18(m):
    model, x = build(m), tokens(2, 5)
    a, b = padded_equal(model, x, tokens(2, 3)), padded_equal(model, x, tokens(2, 3, seed=5))
    assert same(a, b) == same(a, model(x))
    return same(a, b)


def p19(m):
    return keeps_prefix(build(m))


def p20(m):
    model, x = build(m, num_heads=4, num_key_value_heads=2), tokens(2, 6)
    shifted = torch.cat((tokens(2, 3, seed=4), x), 1)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, :3] = False
    return same(model(shifted, mask)[:, 3:], model(x))  # rotary: a shift of all positions changes nothing


def main():
    bad = 0
    for number in range(1, 21):
        prove = globals()[f"p{number:02}"]
        right, wrong = prove(load(number, "right")), prove(load(number, "wrong"))
        declared = [load(number, side).subject.declares for side in ("right", "wrong")]
        ok = right and not wrong and declared[0] == declared[1]
        bad += not ok
        print(f"{number:02}", "ok" if ok else f"NOT OK: right {right}, wrong {wrong}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
