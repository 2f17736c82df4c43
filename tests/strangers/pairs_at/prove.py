"""Shows in plain torch that each wrong file is wrong and each right one right (veriformer is only imported for Subject)."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = dict(
    d_model=16, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=13, max_len=32, num_classes=3, dropout=0.0
)


def load(number, side):
    (path,) = HERE.glob(f"{number:02d}_*_{side}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    assert side == "right" or path.read_text().startswith("WHAT = ")
    return module


def build(module, **sizes):
    torch.manual_seed(0)
    model = module.subject.build(SimpleNamespace(**{**SIZES, **sizes}))
    if isinstance(model, nn.Module):
        model = model.double().eval()
        for p in model.parameters():  # livelier than library defaults
            p.data.add_(torch.randn_like(p) * 0.1)
    return model


def near(a, b, tol=1e-8):
    return torch.allclose(a, b, rtol=tol, atol=tol)


def tokens(b, t, v=13, seed=1):
    return torch.randint(4, v, (b, t), generator=torch.Generator().manual_seed(seed))


def right_padded(t, *lengths):
    return torch.arange(t)[None] < torch.tensor(lengths)[:, None]


def p01(m):
    torch.manual_seed(0)
    out = True
    for t, s in ((5, 37), (37, 37), (3, 9), (20, 32)):
        q, k, v = torch.randn(2, 3, t, 8).double(), torch.randn(2, 3, s, 8).double(), torch.randn(2, 3, s, 5).double()
        mask = torch.rand(2, 1, t, s) > 0.3
        out &= near(m.subject.forward(None, q, k, v, attention_mask=mask), F.scaled_dot_product_attention(q, k, v, mask))
        out &= near(m.subject.forward(None, q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, torch.ones(t, s).tril().bool()))
    return out


def p02(m):
    model = build(m, num_heads=4)
    x, memory, mask = torch.randn(3, 4, 16).double(), torch.randn(3, 6, 16).double(), right_padded(6, 6, 2, 4)
    full = m.subject.forward(model, x, memory, mask)
    return all(
        near(full[b : b + 1], m.subject.forward(model, x[b : b + 1], memory[b : b + 1, :n])) for b, n in enumerate((6, 2, 4))
    )


def p03(m):
    model = build(m, d_model=32)
    x, pos = torch.randn(1, 2, 9, 16).double(), torch.arange(9)
    z = torch.complex(x[..., :2], x[..., 2:4])
    turn = torch.polar(torch.ones(9, 2).double(), pos.double()[:, None] * torch.tensor([1.0, 0.01]).double())
    z = z * turn
    return near(m.subject.forward(model, x, pos), torch.cat((z.real, z.imag, x[..., 4:]), -1))


def p04(m):
    model = build(m)
    model.weight.data = torch.randn(16).double()
    x = torch.randn(2, 3, 16).double().requires_grad_()
    g = torch.randn(2, 3, 16).double()
    y, ref = model(x), F.layer_norm(x, (16,), model.weight, model.bias, 1e-5)
    inputs = (x, model.weight, model.bias)
    assert near(y, ref)
    return all(near(a, b) for a, b in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(ref, inputs, g)))


def p05(m):
    model = build(m)
    x = torch.randn(2, 5, 16).double()
    every = torch.stack([e(x) for e in model.experts], -1)
    best = model.gate(x).softmax(-1)
    best = best * (best >= best.topk(2).values[..., 1:])
    weights = best / best.sum(-1, keepdim=True)
    assert near(m.subject.router(model, x), weights)
    return near(m.subject.forward(model, x), (every * weights[..., None, :]).sum(-1))


def p06(m):
    x = torch.ones(20000, 1, 1).double()
    kept = m.drop_path(x, 0.2, True)
    model = build(m, dropout=0.2)
    assert near(model(x[:2, :1].expand(2, 3, 16)), build(m)(x[:2, :1].expand(2, 3, 16)))
    return abs(kept.mean().item() - 1) < 0.03 and abs((kept == 0).double().mean().item() - 0.2) < 0.02


def p07(m):
    model = build(m)
    table = model.relative_attention_bias.weight

    def bucket(rel):
        ret, n = (16 if rel > 0 else 0), abs(rel)
        return ret + (n if n < 8 else min(15, 8 + int(math.log(n / 8) / math.log(16) * 8 + 1e-9)))

    want = torch.stack([torch.stack([table[bucket(j - i)] for j in range(60)]) for i in range(50)]).permute(2, 0, 1)
    return near(m.subject.forward(model, 50, 60), want)


def p08(m):
    model = build(m)
    x = tokens(2, 7)
    return near(m.subject.forward(model, x), m.subject.forward(model, x, torch.ones(2, 7, dtype=torch.bool))) and near(
        reference_megatron(model, x), m.subject.forward(model, x)
    )


def reference_megatron(model, x):
    h = model.word_embeddings(x) + model.position_embeddings.weight[: x.shape[1]]
    for layer in model.layers:
        a, n = layer.self_attention, layer.input_layernorm(h)
        q, k, v = a.query_key_value(n).view(*x.shape, a.np, 3 * a.hn).transpose(1, 2).chunk(3, -1)
        h = h + a.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return model.final_layernorm(h) @ model.word_embeddings.weight.T


def p09(m):
    model = build(m, num_heads=4, num_key_value_heads=2)
    x = tokens(2, 12)
    whole = m.subject.forward(model, x)
    moved = x.clone()
    moved[:, 0] = (moved[:, 0] + 1) % 13
    assert near(whole[:, 7:], m.subject.forward(model, moved)[:, 7:]) and not near(whole[:, 6], m.subject.forward(model, moved)[:, 6])
    cut = [list(x.split(n, 1)) for n in ([1] * 12, [5, 1, 3, 3], [2, 2, 8])]
    return all(near(m.subject.cache(model, chunks), whole) for chunks in cut) and torch.equal(
        m.subject.generate(model, x[:, :3], 12, True), m.subject.generate(model, x[:, :3], 12, False)
    )


def p10(m):
    model = build(m)
    x = tokens(2, 7)
    ones, mask = torch.ones(2, 7, dtype=torch.bool), right_padded(7, 7, 4)
    run = m.subject.forward
    left = torch.cat((x[1:, 4:], x[1:, :4]), 1), torch.tensor([[False] * 3 + [True] * 4])
    ok = near(run(model, x), run(model, x, ones)) and near(run(model, x, mask)[1:, :4], run(model, x[1:, :4]))
    ids = model.embeddings.create_position_ids(x, None)
    return ok and near(run(model, *left)[:, 3:], run(model, x[1:, :4])) and ids[0].tolist() == list(range(2, 9))


def p11(m):
    model = build(m, num_layers=3)
    source, target, mask = tokens(2, 6), tokens(2, 5, seed=2), right_padded(6, 6, 3)
    run = m.subject.forward
    out = run(model, source, target, mask, right_padded(5, 5, 4))
    return near(out[1:, :4], run(model, source[1:, :3], target[1:, :4])) and near(out[:1], run(model, source[:1], target[:1]))


def p12(m):
    model = build(m)
    x = tokens(2, 7)
    out = m.subject.forward(model, x, right_padded(7, 7, 2))
    return near(out[1:], m.subject.forward(model, x[1:, :2])) and near(out[:1], m.subject.forward(model, x[:1]))


def p13(m):
    model = build(m)
    x = tokens(2, 8)
    whole = m.subject.forward(model, x)
    attn, w = model.attn[0], model.word_emb(x)
    q, k, v = (t.view(2, 8, 2, 8) for t in attn.qkv_net(w).chunk(3, -1))
    scores = torch.full((2, 2, 8, 8), -torch.inf).double()
    for i, j in itertools.product(range(8), range(8)):
        if j <= i:
            r = attn.r_net(model.pos_emb(torch.tensor([float(i - j)]).double()))[0].view(2, 8)
            scores[:, :, i, j] = ((q[:, i] + model.r_w_bias) * k[:, j] + (q[:, i] + model.r_r_bias) * r).sum(-1) / 8**0.5
    vec = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).reshape(2, 8, 16)
    first = attn.layer_norm(w + attn.o_net(vec))
    seen = []
    model.attn[0].register_forward_hook(lambda _, __, out: seen.append(out))
    m.subject.forward(model, x)
    return near(first, seen[0]) and near(m.subject.forward(model, x[:, :5]), whole[:, :5])


def p14(m):
    torch.manual_seed(0)
    model = m.subject.build(SimpleNamespace(**{**SIZES, "d_model": 64, "d_ff": 256, "num_layers": 8}))
    assert model.lm_head.weight is model.wte.weight
    ok = True
    for block in model.h:
        ok &= abs(block.attn_c_proj.weight.std().item() / (0.02 / 4) - 1) < 0.1
        ok &= abs(block.mlp_c_proj.weight.std().item() / (0.02 / 4) - 1) < 0.1
        ok &= abs(block.mlp_c_fc.weight.std().item() / 0.02 - 1) < 0.1
    return ok


def p15(m):
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 6, 9).double(), torch.randint(2, 9, (2, 6))
    labels[1, 3:] = 1
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=1, label_smoothing=0.1)
    return near(m.subject.forward(None, logits, labels), want)


def p16(m):
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 6, 9).double(), torch.randint(0, 9, (4, 6))
    labels[1, 3:] = -100
    want = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    pairs = [(logits[:1], labels[:1]), (logits[1:], labels[1:])]
    assert near(m.subject.forward(None, logits, labels), want)
    return near(m.subject.accumulate(None, pairs), want)


def p17(m):
    s = build(m)
    run = lambda step: m.subject.forward(s, step)
    ok = abs(run(20) - 3e-4) < 1e-12 and abs(run(10) - 1.5e-4) < 1e-12 and abs(run(200) - 3e-5) < 1e-12 and run(500) == 3e-5
    return ok and abs(run(110) - (3e-4 + 3e-5) / 2) < 1e-12 and run(0) == 0


def p18(m):
    t = build(m)
    assert len(t.encoder) == 256 + len(t.merges) and all(p in t.encoder for pair in t.merges for p in pair)
    text = "the lower café_1 is new, don't<|endoftext|> \n  widest 猫"
    first = m.subject.forward(t, text)
    assert t.specials["<|endoftext|>"] in first
    again = m.subject.forward(t, text)
    return first == again and m.subject.decode(t, again) == text and m.subject.forward(t, "the") == m.subject.forward(build(m), "the")


def p19(m):
    model = build(m, num_heads=3, d_model=24)
    x = tokens(4, 3)
    out, probs = m.subject.sampling(model, x, 4, temperature=0.7, top_k=3)
    ok = True
    for step in range(4):
        logits = m.subject.forward(model, out[:, : 3 + step])[:, -1] / 0.7
        best, at = logits.topk(3)
        want = torch.zeros_like(logits).scatter(1, at, best.softmax(-1))
        ok &= near(probs[:, step], want)
    x, mask = tokens(1, 7), torch.tensor([[False, False, True, True, True, True, True]])
    assert near(m.subject.forward(model, x, mask)[:, 2:], m.subject.forward(model, x[:, 2:]))
    assert m.get_slopes(3) == [2**-4, 2**-8, 2**-2]
    return ok


def p20(m):
    collate = build(m, vocab_size=50)
    x = torch.randint(0, 50, (200, 200), generator=torch.Generator().manual_seed(3))
    inputs, labels = m.subject.forward(collate, x, 5)
    ordinary, chosen = x > 3, labels != -100
    assert not (chosen & ~ordinary).any() and torch.equal(labels[chosen], x[chosen]) and torch.equal(inputs[~chosen], x[~chosen])
    share = chosen.sum() / ordinary.sum()
    kept = (inputs == x)[chosen].double().mean()
    hidden = (inputs == 3)[chosen].double().mean()
    return abs(share - 0.15) < 0.006 and abs(kept - 0.102) < 0.02 and abs(hidden - 0.802) < 0.03


if __name__ == "__main__":
    bad = 0
    for number in range(1, 21):
        judge = globals()[f"p{number:02d}"]
        right, wrong = bool(judge(load(number, "right"))), bool(judge(load(number, "wrong")))
        ok = right and not wrong
        bad += not ok
        print(f"{number:02d} {'ok' if ok else f'NOT OK (right {right}, wrong {wrong})'}", flush=True)
    sys.exit(bad > 0)
