"""Shows in plain torch, for each pair, that the wrong file is wrong and the right one right."""
import copy
import importlib.util
import math
from pathlib import Path

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32)


def load(number, which):
    (path,) = HERE.glob(f"{number:02d}_*_{which}.py")
    spec = importlib.util.spec_from_file_location(f"{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module, config=C, seed=0, spread=0.3, **sizes):
    torch.manual_seed(seed)
    model = module.subject.build(DrawnConfig(**{**vars_of(config), **sizes})).double().eval()
    if spread:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(spread * torch.randn_like(p))
    return model


def vars_of(config):
    return {k: getattr(config, k) for k in config.__dataclass_fields__}


def tokens(*shape, seed=1):
    return torch.randint(2, 11, shape, generator=torch.Generator().manual_seed(seed))


def near(a, b, tol=1e-9):
    return a.shape == b.shape and bool((a - b).abs().max() < tol)


def p01(m):
    model, a, b = make(m), tokens(2, 4), tokens(2, 4, seed=2)
    good = True
    for prompt in (a, b, a[:1]):
        good &= bool((model.generate(prompt, 6, True) == model.generate(prompt, 6, False)).all())
    model(a)
    model.generate(b, 1, True)
    model.reset(2)
    return good and near(model(a, use_cache=True)[:, -1], model(a)[:, -1])


def p02(m):
    model = make(m, spread=0, d_model=128, num_layers=6, d_ff=256)
    stds = [p.std().item() for n, p in model.named_parameters() if n.endswith("c_proj.weight")]
    return len(stds) == 12 and all(abs(s / (0.02 / math.sqrt(12)) - 1) < 0.05 for s in stds)


def p03(m):
    model, x, order = make(m), tokens(3, 7), [2, 0, 0]
    head, tail = x[:, :4], x[:, 4:]
    got = m.subject.cache(model, [head, tail[:, :1], tail[:, 1:]], reorder=order)
    want = model(torch.cat([head[order], tail], 1))
    return near(m.subject.cache(model, [head, tail]), model(x)) and near(got[:, :4], model(head)) and near(got[:, 4:], want[:, 4:])


def p04(m):
    model, x = make(m), tokens(2, 7)
    return near(model(x)[:, :4], model(x[:, :4]))


def p05(m):
    model, x = make(m), tokens(2, 12)
    full = model(x)
    one = make(m, num_layers=1)
    y = x.clone()
    y[:, 3] = (y[:, 3] + 1) % 11
    moved = (one(x) - one(y)).abs().amax((0, 2)) > 1e-9
    window = moved.tolist() == [3 <= t < 3 + m.WINDOW for t in range(12)]
    return window and all(
        near(m.subject.cache(model, x.split(s, 1)), full) for s in (1, 2, 5, [5, 1, 1, 1, 3, 1], [1, 1, 6, 4], [6, 1, 5])
    )


def p06(m):
    model, x = make(m), tokens(2, 5)
    loss = lambda: model(x).square().sum()
    loss().backward()
    p, g, h = model.embed, model.embed.grad.clone(), 1e-6
    way = torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype)
    with torch.no_grad():
        p += h * way
        up = loss()
        p -= 2 * h * way
        down = loss()
    want = (up - down) / (2 * h)
    return abs((g * way).sum() / want - 1).item() < 1e-6


def p07(m):
    model = make(m)
    moe, x = model.layers[0].block_sparse_moe, torch.randn(3, 5, 16, dtype=torch.float64)
    w = m.router(model, x)
    want = sum(w[..., e, None] * expert(x) for e, expert in enumerate(moe.experts))
    return near(w.sum(-1), torch.ones(3, 5).double()) and bool(((w > 0).sum(-1) == 2).all()) and near(moe(x), want)


def p08(m):
    model = make(m)
    moe, x = model.layers[1].ffn, torch.randn(3, 5, 16, dtype=torch.float64)
    w = m.router(model, x)
    want = sum(w[..., e, None] * expert(x) for e, expert in enumerate(moe.experts)) + moe.shared(x)
    t = tokens(3, 5)
    return bool(((w > 0).sum(-1) == 2).all()) and near(moe(x), want) and near(model(t)[1:], model(t[1:]))


def p09(m):
    model = make(m, num_layers=1)
    s = tokens(2, 5)
    t = torch.tensor([[3, 4, 5, 6, 7, 8]])
    # two tokens of the past change places; one layer without distances does not see it
    a, b = model(s[:1], t), model(s[:1], t[:, [1, 0, 3, 2, 4, 5]])
    distances = not near(a[:, 5], b[:, 5], 1e-6)
    bucket = lambda d: m.relative_position_bucket(torch.tensor(d), False).item()
    table = [bucket(-d) for d in range(0, 30)]
    want = [d if d < 4 else min(7, 4 + int(math.log(d / 4) / math.log(20 / 4) * 4)) for d in range(0, 30)]
    attn = model.decoder.block[0].self_attn
    bias = attn.compute_bias(6, 6, "cpu")[0]
    rows = attn.relative_attention_bias.weight
    exact = all(near(bias[:, i, j], rows[want[i - j]]) for i in range(6) for j in range(i + 1))
    return distances and table == want and exact


def p10(m):
    model = make(m)
    model(tokens(2, 4), tokens(2, 5)).square().sum().backward()
    trained = all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "norm" in n)
    layer = copy.deepcopy(model.decoder_layers[0])
    x, enc = torch.randn(5, 2, 16).double(), torch.randn(4, 2, 16).double()
    hide = torch.ones(5, 5, dtype=torch.bool).triu(1)
    h = layer.self_attn_layer_norm(x + layer.self_attn(x, x, x, attn_mask=hide))
    h = layer.encoder_attn_layer_norm(h + layer.encoder_attn(h, enc, enc))
    h = layer.final_layer_norm(h + layer.fc2(F.gelu(layer.fc1(h))))
    return trained and near(layer(x, enc, None, hide, None), h)


def p11(m):
    model = make(m, spread=0)
    one = model.cls.decoder.weight is model.embeddings.word_embeddings.weight
    copied = copy.deepcopy(model)
    before = copied(tokens(2, 4))
    with torch.no_grad():
        copied.cls.decoder.weight.mul_(2)
    table = copied.embeddings.word_embeddings.weight
    return one and near(table, copied.cls.decoder.weight) and not near(copied(tokens(2, 4)), before)


def p12(m):
    model = make(m, spread=0)
    return all(bool((t.weight[1] == 0).all()) and bool((t.weight[0] != 0).all()) for t in (model.word_embeddings, model.position_embeddings))


def p13(m):
    model, x = make(m), tokens(3, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]).bool()
    got = model(x, mask)
    return all(near(got[i], model(x[i : i + 1, : int(mask[i].sum())])[0]) for i in range(3))


def p14(m):
    model = make(m)
    images = torch.randn(2, 3, 8, 12).double()
    got = m.subject.patches(model, images)
    w, b = model.patch_embed.proj.weight.flatten(1), model.patch_embed.proj.bias
    want = [
        images[:, :, r : r + 4, c : c + 4].flatten(1) @ w.T + b + model.pos_embed[:, 1 + (r // 4) * 3 + c // 4]
        for r in (0, 4) for c in (0, 4, 8)
    ]
    want = [(model.cls_token + model.pos_embed[:, :1])[:, 0].expand(2, -1), *want]
    return near(got, torch.stack(want, 1))


def p15(m):
    model = make(m, dropout=0.5, num_layers=1)
    x = torch.randn(64, 5, 16).double()
    model.train()
    y = model(x)
    block = model.blocks[0]
    first = x + 2 * block.ls1(block.attn(block.norm1(x)))
    second = lambda z: 2 * block.ls2(block.mlp(block.norm2(z)))
    allowed = torch.stack([x, first, x + second(x), first + second(first)])  # neither branch, one, both
    hit = (allowed - y).abs().amax((2, 3)).amin(0) < 1e-9
    return bool(hit.all())


def p16(m):
    good = True
    for seed, T in enumerate((1, 2, 3, 5, 6, 7, 9)):
        model, x = make(m, num_layers=3), tokens(2, T, seed=seed)
        alone = model(x)
        for more in (1, 3, 4, 6):
            mask = torch.cat([torch.ones(2, T), torch.zeros(2, more)], 1).bool()
            good &= near(model(torch.cat([x, tokens(2, more)], 1), mask)[:, :T], alone)
    # by hand: one layer's windows, unshifted and shifted
    block = model.blocks[1]
    h, T = torch.randn(1, 9, 16).double(), 9
    z, out = block.norm1(h), torch.zeros(1, 9, 16).double()
    for group in ([0, 1], [2, 3, 4, 5], [6, 7, 8]):
        q, k, v = block.attn.qkv(z[0, group]).view(len(group), 3, 4, 4).permute(1, 2, 0, 3)
        d = torch.tensor(group)[:, None] - torch.tensor(group)[None, :] + 3
        s = q @ k.transpose(1, 2) / 2 + block.attn.relative_position_bias_table[d].permute(2, 0, 1)
        out[0, group] = block.attn.proj((s.softmax(-1) @ v).transpose(0, 1).reshape(len(group), 16))
    want = h + out
    want = want + block.mlp(block.norm2(want))
    return good and near(block(h, torch.ones(1, 9, dtype=torch.bool)), want)


def p17(m):
    model, t, good = make(m), tokens(2, 4), True
    for S in (1, 2, 3, 4, 5, 6):
        x = tokens(2, S)
        alone = model(x, t)
        for more in (1, 2, 3):
            mask = torch.cat([torch.ones(2, S), torch.zeros(2, more)], 1).bool()
            good &= near(model(torch.cat([x, tokens(2, more)], 1), t, mask), alone)
    return good


def p18(m):
    counts = [sum(p.numel() for p in make(m, num_layers=n, spread=0).layers.parameters()) for n in (1, 2, 3)]
    return counts[1] == 2 * counts[0] and counts[2] == 3 * counts[0]


def p19(m):
    model, x = make(m), tokens(3, 4)
    alone, good = model(x), True
    for left, right in ((0, 2), (1, 0), (3, 0), (2, 1)):
        mask = torch.cat([torch.zeros(3, left), torch.ones(3, 4), torch.zeros(3, right)], 1).bool()
        good &= near(model(torch.cat([tokens(3, left), x, tokens(3, right)], 1), mask), alone)
    return good


def p20(m):
    model, x = make(m), tokens(2, 6)
    labels = x.clone()
    labels[0, 3] = labels[1, 5] = -100
    logp = model(x)[1].log_softmax(-1)
    terms = [-logp[b, t, labels[b, t + 1]] for b in range(2) for t in range(5) if labels[b, t + 1] != -100]
    return near(m.subject.loss(model, x, labels), sum(terms) / len(terms))


def sane(m):
    """What every right file also keeps: padding on the declared sides, causality, one sample alone, gradients everywhere."""
    s, kind, good = m.subject, m.subject.kind, True
    facts = dict(s.declares)
    for sizes in ({}, {"d_model": 12, "num_heads": 3, "num_key_value_heads": 3, "num_layers": 3}, {"num_layers": 1, "num_heads": 8, "num_key_value_heads": 4}):
        model = make(m, **sizes)
        D = sizes.get("d_model", 16)
        if kind == "layer":
            x = torch.randn(3, 5, D).double()
            good &= near(s.forward(model, x)[1:], s.forward(model, x[1:])) and s.forward(model, x).shape == x.shape
            order = [3, 1, 0, 4, 2]
            good &= near(s.forward(model, x[:, order]), s.forward(model, x)[:, order])
            continue
        if kind == "cross_attention":
            x, y = torch.randn(3, 5, D).double(), torch.randn(3, 4, D).double()
            mask = torch.tensor([[1, 1, 1, 0]] * 3).bool()
            good &= near(s.forward(model, x, y, mask), s.forward(model, x, y[:, :3]))
            good &= near(s.forward(model, x, y)[1:], s.forward(model, x[1:], y[1:]))
            continue
        x = tokens(3, 6)
        pre = (tokens(3, 5, seed=5),) if kind == "encoder_decoder" else ()
        out = s.forward(model, *pre, x)
        good &= bool(out.isfinite().all()) and near(s.forward(model, *(p[1:] for p in pre), x[1:]), out[1:])
        if kind in ("decoder", "encoder_decoder"):
            good &= near(s.forward(model, *pre, x[:, :4]), out[:, :4])
        model.zero_grad()
        out.square().sum().backward()
        good &= all(p.grad is not None for p in model.parameters())
        side = facts.get("padding_side")
        for where in {"right": ["right"], "both": ["left", "right"], None: []}[side]:
            extra, real = tokens(3, 3, seed=7), torch.ones(3, 6).bool()
            hidden = torch.zeros(3, 3).bool()
            longer = torch.cat([extra, x] if where == "left" else [x, extra], 1)
            mask = torch.cat([hidden, real] if where == "left" else [real, hidden], 1)
            got = s.forward(model, *pre, longer, **{"target_mask" if pre else "attention_mask": mask})
            if kind != "classifier":
                got = got[:, 3:] if where == "left" else got[:, :6]
            good &= near(got, out)
            if pre:
                longer = torch.cat([pre[0], extra], 1)
                mask = torch.cat([torch.ones(3, 5), torch.zeros(3, 3)], 1).bool()
                good &= near(s.forward(model, longer, x, source_mask=mask), out)
    return good


if __name__ == "__main__":
    for number in range(1, 21):
        proof = globals()[f"p{number:02d}"]
        right, wrong = load(number, "right"), load(number, "wrong")
        assert wrong.WHAT and right.subject.declares == wrong.subject.declares
        r, w, s = proof(right), proof(wrong), sane(right)
        print(f"{number:02d}", "ok" if r and s and not w else f"NOT OK: right {r}, wrong {w}, right otherwise {s}", flush=True)
