"""Shows for each pair, in plain torch, that the wrong file is wrong and the right one right."""
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent


def load(number, which):
    (path,) = HERE.glob(f"{number:02d}_*_{which}.py")
    spec = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sizes(**more):
    base = dict(
        d_model=16, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=32,
        num_classes=3, dropout=0.0,
    )
    return SimpleNamespace(**(base | more))


def build(module, **more):
    torch.manual_seed(0)
    model = module.subject.build(sizes(**more)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype) * (0.5 if p.ndim > 1 else 0.3) + (p.ndim == 1) * 0.7)
    return model


def tokens(batch=2, length=8, seed=1):
    return torch.randint(2, 11, (batch, length), generator=torch.Generator().manual_seed(seed))


def near(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-7, atol=1e-8)


def cached_equals_full(module, lengths):
    model = build(module)
    x = tokens(length=sum(lengths))
    return near(module.subject.cache(model, list(x.split(lengths, dim=1))), module.subject.forward(model, x))


def p01(m):  # post-norm: with gain 1 and bias 0 all channels of an output have mean 0 and variance 1
    model = build(m)
    for layer in model.layer:
        torch.nn.init.ones_(layer.output.LayerNorm.weight), torch.nn.init.zeros_(layer.output.LayerNorm.bias)
    y = model(tokens())
    return near(y.mean(-1), torch.zeros_like(y[..., 0])) and near(y.var(-1, unbiased=False), torch.ones_like(y[..., 0]))


def p02(m):  # every position that is used learns
    torch.manual_seed(0)
    model = m.subject.build(sizes())
    (model(tokens(length=4)) * torch.randn(16)).sum().backward()
    table = model.embed_positions.weight
    return bool((table.grad[2:6].abs().sum(-1) > 0).all() and (table[2:6].abs().sum(-1) > 0).all())


def p03(m):  # head and embedding: one parameter, also after a change of dtype and a step of Adam
    torch.manual_seed(0)
    model = m.subject.build(sizes()).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = tokens()
    m.subject.loss(model, x, x.roll(-1, 1)).backward()
    optimizer.step()
    same = model.lm_head.weight is model.transformer.wte.weight
    return same and torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def p04(m):  # rotation keeps norms and is multiplication by exp(i t w) on interleaved pairs
    x = torch.randn(1, 6, 2, 4, dtype=torch.float64)
    got = m.apply_rotary_pos_emb(x, *m.fixed_pos_embedding(4, 6, x))
    w = torch.tensor([1.0, 10000**-0.5], dtype=torch.float64)
    turn = torch.exp(1j * torch.arange(6, dtype=torch.float64)[:, None] * w)[None, :, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * turn).flatten(-2)
    return near(got, expected) and near(got.norm(dim=-1), x.norm(dim=-1))


def p05(m):
    assert cached_equals_full(m, [4, 1, 1, 1, 1])
    return cached_equals_full(m, [3, 2, 3])


def p06(m):
    return cached_equals_full(m, [4, 1, 1, 1, 1])


def p07(m):  # cap * tanh(scale q k / cap), written with loops
    torch.manual_seed(0)
    p = {n: torch.randn(8, 8, dtype=torch.float64) for n in "qkvo"}
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    got = m.attend(p, x, 2, allowed)
    heads = []
    for h in range(2):
        q, k, v = ((x[0] @ p[n].T)[:, 4 * h : 4 * h + 4] for n in "qkv")
        q, k = m.rotary(q), m.rotary(k)
        rows = []
        for t in range(4):
            scores = torch.stack([4.0 * torch.tanh((q[t] @ k[s]) / math.sqrt(4) / 4.0) for s in range(t + 1)])
            rows.append(scores.softmax(0) @ v[: t + 1])
        heads.append(torch.stack(rows))
    return near(got[0], torch.cat(heads, -1) @ p["o"].T)


def p08(m):  # keys have a gain of their own: it has a gradient, and the output depends on it
    model = build(m)
    before = model(tokens())
    before.square().sum().backward()
    gains = [layer.self_attn.k_norm.weight for layer in model.layers]
    learns = all(g.grad is not None and g.grad.abs().sum() > 0 for g in gains)
    with torch.no_grad():
        gains[0].mul_(torch.linspace(1, 2, 8, dtype=torch.float64))
    return learns and not near(model(tokens()), before)


def p09(m):  # what comes after the exchange is that of the exchanged sequences
    model = build(m)
    x, order = tokens(batch=3, length=6), torch.tensor([2, 0, 0])
    got = m.subject.cache(model, [x[:, :3], x[:, 3:5], x[:, 5:]], reorder=order)
    whole = m.subject.forward(model, torch.cat((x[order, :3], x[:, 3:]), 1))
    return near(got[:, 3:], whole[:, 3:])


def p10(m):  # Raffel et al.: half of the buckets for each side, exact below a half of these, logarithmic to 16
    def bucket(distance):  # key - query
        side, n = (4 if distance > 0 else 0), abs(distance)
        if n < 2:
            return side + n
        return side + min(3, 2 + int(math.log(n / 2) / math.log(16 / 2) * 2))

    model = build(m)
    expected = torch.tensor([[bucket(s - t) for s in range(20)] for t in range(20)])
    return torch.equal(model(20, 20), model.relative_attention_bias.weight[expected].permute(2, 0, 1))


def p11(m):
    model = build(m)
    source, target = tokens(length=5, seed=2), tokens(length=6)
    got = m.subject.cache(model, source, [target[:, :2], target[:, 2:3], target[:, 3:]])
    return near(got, m.subject.forward(model, source, target))


def p12(m):
    model = build(m, num_heads=4)
    x, memory = torch.randn(2, 3, 16).double(), torch.randn(2, 5, 16).double()
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (model.query(x), model.key(memory), model.value(memory)))
    expected = model.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return near(m.subject.forward(model, x, memory), expected)


def p13(m):  # a token is made of its own patch and of nothing else
    model = build(m)
    images = torch.randn(1, 3, 8, 12).double()
    base = m.subject.patches(model, images)
    for row in range(2):
        for column in range(3):
            changed = images.clone()
            changed[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += torch.randn(1, 3, 4, 4).double()
            moved = (m.subject.patches(model, changed) - base).abs().sum(-1)[0] > 1e-9
            if moved.nonzero().flatten().tolist() != [1 + 3 * row + column]:
                return False
    return True


def p14(m):  # a sample in a batch is what it is alone; and windows are as the definition has them
    model = build(m)
    x = torch.randn(3, 10, 16).double()
    alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
    block = model.blocks[1]
    influence = torch.autograd.functional.jacobian(lambda y: block(y).sum(-1)[0], x[:1])[:, 0].abs().sum(-1) > 1e-12
    group = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 2])  # shifted by 2: windows 0-1, 2-5, 6-9
    assert torch.equal(influence, group[:, None] == group[None, :])
    return near(model(x), alone)


def p15(m):
    def bucket(d):  # q - k; mid 2, three and more are logarithmic, the sign stays
        n = abs(d)
        if n <= 2:
            return d
        return int(math.copysign(math.ceil(math.log(n / 2) / math.log(15 / 2) - 1e-6) + 2, d))

    got = m.build_relative_position(9, 9)
    reference = torch.tensor([[bucket(i - j) for j in range(9)] for i in range(9)])
    return torch.equal(got, reference) and torch.equal(got, -got.T)


def p16(m):
    model = build(m, dropout=0.5)
    return torch.equal(model(tokens()), model(tokens()))


def p17(m):
    return cached_equals_full(m, [3, 2, 1, 2])


def p18(m):
    assert cached_equals_full(m, [3, 1, 1, 1])  # single steps are right in both
    return cached_equals_full(m, [2, 3, 1, 2])


def p19(m):
    model = build(m)
    x = torch.randn(2, 5, 16).double()
    weights = m.subject.router(model, x)
    assert near(weights.sum(-1), torch.ones(2, 5).double()) and ((weights > 0).sum(-1) == 2).all()
    expected = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(model.experts))
    return near(model(x), expected)


def p20(m):
    model = build(m)
    x = torch.randn(2, 6, 16).double()
    with m.subject.backends["naive"]():
        naive = model(x)
    with m.subject.backends["absorb"]():
        absorbed = model(x)
    # by hand: the naive path with torch's own attention
    f = model.freqs_cis(6, "cpu")
    q = model.wq(x).view(2, 6, 2, 8)
    q = torch.cat((q[..., :4], m.apply_rotary_emb(q[..., 4:], f)), -1)
    a = model.wkv_a(x)
    up = model.wkv_b(model.kv_norm(a[..., :6])).view(2, 6, 2, 12)
    pe = m.apply_rotary_emb(a[..., None, 6:], f).expand(2, 6, 2, 4)
    k = torch.cat((up[..., :4], pe), -1)
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, up[..., 4:])), is_causal=True)
    hand = model.wo(out.transpose(1, 2).flatten(2))
    return near(naive, hand) and near(absorbed, hand)


if __name__ == "__main__":
    bad = 0
    for number in range(1, 21):
        proof = globals()[f"p{number:02d}"]
        torch.manual_seed(0)
        right = proof(load(number, "right"))
        torch.manual_seed(0)
        wrong_module = load(number, "wrong")
        assert wrong_module.WHAT
        wrong = proof(wrong_module)
        fine = right and not wrong
        bad += not fine
        print(f"{number:02d} {'ok' if fine else f'NOT OK: right {right}, wrong {wrong}'}", flush=True)
    raise SystemExit(bad > 0)
