"""For each pair: the wrong file is wrong, the right one right, in plain torch. veriformer is not imported: `Subject` is a stub here."""
import importlib.util
import math
import re
import sys
import types
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent

stub, inner = types.ModuleType("veriformer"), types.ModuleType("veriformer.properties")
inner.Subject = lambda **said: types.SimpleNamespace(**said)
stub.properties = inner
sys.modules["veriformer"], sys.modules["veriformer.properties"] = stub, inner

CONFIG = types.SimpleNamespace(
    d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=50, max_len=32, num_classes=3,
    dropout=0.0, d_head=4,
)


def load(number, side):
    (path,) = HERE.glob(f"{number:02d}_*_{side}.py")
    if side == "wrong":
        assert path.read_text().startswith("WHAT = ")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def build(module, seed=0):
    torch.manual_seed(seed)
    model = module.subject.build(CONFIG)
    if isinstance(model, torch.nn.Module):
        model = model.double().eval()
        with torch.no_grad():
            for p in model.parameters():  # far from special initial values
                p.add_(0.3 * torch.randn_like(p))
    return model


def near(a, b, tol=1e-9):
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and (a - b).abs().max().item() < tol


def rand(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape, seed=2):
    return torch.randint(4, CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# Each check takes a module and says whether it is right: True or False.
def check_01(m):
    fine = []
    for dim in (-1, 1, 0):
        x = rand(3, 4, 5).requires_grad_()
        g = rand(3, 4, 5, seed=9)
        y = m.subject.forward(None, x, dim)
        assert near(y, x.softmax(dim))
        (a,) = torch.autograd.grad((y * g).sum(), x)
        (b,) = torch.autograd.grad((x.softmax(dim) * g).sum(), x)
        fine.append(near(a, b))
    assert fine[0]  # the last axis is right in both
    return all(fine)


def check_02(m):
    def reference(q, k, v, mask, causal):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        T, S = q.shape[2], k.shape[2]
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        allowed = torch.ones(T, S, dtype=torch.bool)
        if causal:
            allowed = allowed.tril(S - T)
        allowed = allowed.expand(s.shape) if mask is None else allowed & mask.expand(s.shape)
        return s.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0.0) @ v

    fine = []
    for T, S, causal, masked in ((20, 20, True, False), (20, 33, False, True), (33, 20, True, False), (5, 29, True, False), (20, 33, True, True)):
        q, k, v = rand(2, 4, T, 6), rand(2, 2, S, 6, seed=3), rand(2, 2, S, 5, seed=4)
        mask = rand(2, 1, T, S, seed=5) > -0.5 if masked else None
        fine.append(near(m.subject.forward(None, q, k, v, attention_mask=mask, causal=causal), reference(q, k, v, mask, causal)))
    assert fine[0] and fine[1] and fine[2]
    return all(fine)


def check_03(m):
    model = build(m)
    x = rand(2, 6, 16)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    q = model.q_proj(x).view(2, 6, 4, 4)
    k = model.k_proj(x).view(2, 6, 2, 4).repeat_interleave(2, 2)
    v = model.v_proj(x).view(2, 6, 2, 4).repeat_interleave(2, 2)
    s = 5.0 * torch.tanh(torch.einsum("bthd,bshd->bhts", q, k) / 2.0 / 5.0)
    s = s.masked_fill(~(torch.ones(6, 6, dtype=torch.bool).tril() & mask[:, None, None, :]), -math.inf)
    y = model.o_proj(torch.einsum("bhts,bshd->bthd", s.softmax(-1), v).reshape(2, 6, 16))
    return near(m.subject.forward(model, x, mask), y)


def check_04(m):
    model = build(m)
    x, memory = rand(3, 4, 16), rand(3, 6, 16, seed=7)
    assert near(m.subject.forward(model, x, memory), torch.cat([m.subject.forward(model, x[i:i+1], memory[i:i+1]) for i in range(3)]))
    lengths = (6, 2, 4)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    alone = torch.cat([m.subject.forward(model, x[i:i+1], memory[i:i+1, :n]) for i, n in enumerate(lengths)])
    return near(m.subject.forward(model, x, memory, mask), alone)


def check_05(m):
    model = m.subject.build(CONFIG)

    def reference(n):
        return torch.tensor([[(math.sin if j % 2 == 0 else math.cos)(p / 10000 ** (2 * (j // 2) / 16)) for j in range(16)] for p in range(n)])

    assert near(model(16), reference(16), 1e-6)
    return near(model(20), reference(20), 1e-6) and near(model(90), reference(90), 1e-6)


def check_06(m):
    x, positions = rand(2, 3, 5, 8), torch.tensor([0, 1, 4, 7, 30])
    theta = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turned = torch.view_as_complex(x.reshape(2, 3, 5, 4, 2).contiguous()) * torch.polar(torch.ones_like(theta), theta)
    y = m.subject.forward(m.subject.build(CONFIG), x, positions)
    return near(y, torch.view_as_real(turned).reshape(x.shape)) and near(y.norm(dim=-1), x.norm(dim=-1))


def check_07(m):
    model = build(m)

    def bucket(r):  # Raffel et al., as in their code, by exact comparison of powers
        n, side = abs(r), 16 if r > 0 else 0
        if n < 8:
            return side + n
        steps = max(i for i in range(8) if n**8 >= 8**8 * 16**i) if n < 128 else 7
        return side + min(8 + steps, 15)

    table = model.relative_attention_bias.weight
    reference = torch.stack([torch.stack([table[bucket(j - i)] for j in range(150)]) for i in range(5)]).permute(2, 0, 1)
    back = torch.stack([torch.stack([table[bucket(j - i)] for j in range(3)]) for i in range(150)]).permute(2, 0, 1)
    return near(model(5, 150), reference) and near(model(150, 3), back)


def check_08(m):
    model = build(m)
    x, g = rand(2, 3, 16).requires_grad_(), rand(2, 3, 16, seed=8)
    reference = model.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    assert near(model(x), reference)
    (a,) = torch.autograd.grad((model(x) * g).sum(), x)
    (b,) = torch.autograd.grad((reference * g).sum(), x)
    return near(a, b)


def check_09(m):
    model = build(m)
    x = rand(2, 7, 16)
    dense = m.subject.router(model, x)
    assert near(dense.sum(-1), torch.ones(2, 7).double()) and ((dense > 0).sum(-1) == 2).all()
    assert near(dense, (lambda p: torch.where(p >= p.topk(2).values[..., -1:], p, 0.0))(model.gate(x).softmax(-1)) / model.gate(x).softmax(-1).topk(2).values.sum(-1, keepdim=True))
    return near(model(x), sum(dense[..., e, None] * expert(x) for e, expert in enumerate(model.experts)))


def check_10(m):
    model = build(m)
    images = rand(2, 3, 8, 12)
    rows = [images[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten(1) for i in range(2) for j in range(3)]
    return near(m.subject.patches(model, images), model.embed(torch.stack(rows, 1)) + model.pos)


def check_11(m):
    model = build(m)
    x = tokens(4, 7)
    lengths = (7, 3, 5, 4)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    y = m.subject.forward(model, x, mask)
    two = m.subject.forward(model, x[:2], mask[:2])
    alone = [m.subject.forward(model, x[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    assert all(near(two[i, : lengths[i]], alone[i]) for i in range(2))
    # independent: sample 0 alone, by dense attention and sinusoids written out
    p = torch.tensor([[(math.sin if j % 2 == 0 else math.cos)(t / 10000 ** (2 * (j // 2) / 16)) for j in range(16)] for t in range(7)], dtype=torch.float64)
    h = model.embed(x[0]) + p
    for layer in model.layers:
        q, k, v = (z.view(7, 4, 4).transpose(0, 1) for z in layer.Wqkv(layer.attn_norm(h)).chunk(3, -1))
        h = h + layer.Wo(((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v).transpose(0, 1).reshape(7, 16))
        h = h + layer.Wout(F.gelu(layer.Wi(layer.mlp_norm(h))))
    assert near(alone[0], model.final_norm(h))
    empty = mask.clone()
    empty[1] = False
    assert torch.isfinite(m.subject.forward(model, x, empty)).all()
    return all(near(y[i, :n], alone[i]) for i, n in enumerate(lengths))


def check_12(m):
    model = build(m)
    x = tokens(2, 13)
    whole = m.subject.forward(model, x)
    other = x.clone()
    other[:, 0] = (x[:, 0] - 3) % 46 + 4
    moved = (m.subject.forward(model, other) - whole).abs().amax((0, 2)) > 1e-12
    assert moved.tolist() == [t < 1 + 2 * (4 - 1) for t in range(13)]  # two layers of window 4
    assert near(m.subject.cache(model, x.split(1, 1)), whole)
    return near(m.subject.cache(model, x.split([5, 3, 1, 4], 1)), whole)


def check_13(m):
    model = build(m)
    fine = []
    for seed in range(6):
        source = tokens(3, 7, seed=seed)
        fine.append(torch.equal(model.generate(source, 8, True), model.generate(source, 8, False)))
    assert fine[0]  # the first call is right in both
    source, target = tokens(2, 6), tokens(2, 5, seed=5)
    mask = torch.arange(6) < torch.tensor([6, 4])[:, None]
    assert near(model(source, target, mask)[1:], model(source[1:, :4], target[1:]))
    return all(fine)


def check_14(m):
    model = build(m)
    x = tokens(3, 8)
    assert near(model(x), torch.cat([model(x[i : i + 1]) for i in range(3)]), 1e-6)
    lengths = (8, 3, 5)
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    alone = torch.cat([model(x[i : i + 1, :n]) for i, n in enumerate(lengths)])
    left = torch.stack([torch.cat([x[i, n:], x[i, :n]]) for i, n in enumerate(lengths)])
    return near(model(x, mask), alone) and near(model(left, mask.flip(1)), alone)


def check_15(m):
    logits, labels = rand(3, 7, 11), torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(3))
    assert near(m.subject.forward(None, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    labels[0, 4:], labels[2, 1:] = -100, -100
    assert m.subject.forward(None, logits, torch.full_like(labels, -100)).item() == 0.0
    return near(m.subject.forward(None, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def check_16(m):
    model = m.subject.build(CONFIG)
    x = torch.randint(0, CONFIG.vocab_size, (200, 500), generator=torch.Generator().manual_seed(4))
    inputs, labels = m.subject.forward(model, x, 5)
    counted = labels != -100
    assert (labels[counted] == x[counted]).all() and (inputs == x)[~counted].all()
    assert not counted[x < 4].any()
    share = counted[x >= 4].double().mean().item()
    kept = (inputs == x)[counted].double().mean().item()
    masked = (inputs == 3)[counted].double().mean().item()
    return abs(share - 0.15) < 0.006 and abs(masked - 0.8) < 0.015 and 0.08 < kept < 0.125


def check_17(m):
    rate = m.subject.build(CONFIG)
    assert rate(0) == 0 and abs(rate(10) - 5e-4) < 1e-12 and abs(rate(20) - 1e-3) < 1e-12
    return all(
        abs(rate(s) - (1e-4 + 9e-4 * math.cos(math.pi / 2 * (s - 20) / 180) ** 2)) < 1e-12 for s in range(20, 201)
    ) and rate(199) < 1.001e-4


def check_18(m):
    model = build(m)
    groups = m.subject.forward(model)
    got = Counter(id(p) for group in groups for p in group["params"])
    assert all(n == 1 for n in got.values())
    decayed = {id(p) for p in groups[0]["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.ndim == 2} and groups[1]["weight_decay"] == 0
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimiser = torch.optim.AdamW(groups, lr=0.1)
    model(rand(2, 5, 16)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    optimiser.step()
    return set(got) == {id(p) for p in model.parameters()} and not any(torch.equal(before[n], p) for n, p in model.named_parameters())


def check_19(m):
    texts = ["zq zq zq zq zq zq zq", "ab abc abd abe"]
    tokenizer = m.subject.train(texts, 262)
    # independent: bytes, recomputed from scratch after every merge, over every occurrence in the text
    corpus = [[bytes([b]) for b in w.encode()] for t in texts for w in re.findall(r" ?\S+|\s+", t)]
    letter = {bytes([b]): c for b, c in m.LETTER.items()}
    fine = True
    for a, b in tokenizer.merges:
        back = tuple(bytes(m.BYTE[c] for c in piece) for piece in (a, b))
        counts = Counter(pair for word in corpus for pair in zip(word, word[1:]))
        fine = fine and counts[back] == max(counts.values())
        for n, word in enumerate(corpus):
            out, i = [], 0
            while i < len(word):
                step = 2 if tuple(word[i : i + 2]) == back else 1
                out.append(b"".join(word[i : i + step]))
                i += step
            corpus[n] = out
    assert letter[b"a"] == "a"
    for text in ("zq ab  abc\n\tabé 漢字", "", " x", "the cat"):
        assert m.subject.decode(tokenizer, m.subject.forward(tokenizer, text)) == text
    return fine


def check_20(m):
    model = build(m)
    x = tokens(2, 9)
    whole = m.subject.forward(model, x)
    # independent: one layer's attention, entry by entry, sample 0
    attention, h = model.layers[0].attention, rand(1, 5, 16)
    y = attention(h, None)
    q, k, v = (z(h)[0].view(5, 4, 4) for z in (attention.query, attention.key, attention.value))
    rate = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    r = [attention.relative(torch.cat([(d * rate).sin(), (d * rate).cos()])).view(4, 4) for d in range(5)]
    out = torch.zeros(5, 4, 4).double()
    for i in range(5):
        for n in range(4):
            s = torch.stack([((q[i, n] + attention.u[n, 0]) @ k[j, n] + (q[i, n] + attention.v[n, 0]) @ r[i - j][n]) / 2 for j in range(i + 1)])
            out[i, n] = s.softmax(0) @ v[: i + 1, n]
    assert near(y[0], attention.output(out.reshape(5, 16)))
    later = x.clone()
    later[:, 6:] = 4 + (x[:, 6:] - 3) % 46
    assert near(m.subject.forward(model, later)[:, :6], whole[:, :6])
    return near(m.subject.cache(model, x.split([4, 1, 4], 1)), whole)


def main():
    bad = 0
    for number in range(1, 21):
        check = globals()[f"check_{number:02d}"]
        try:
            verdicts = check(load(number, "right")), check(load(number, "wrong"))
        except Exception as error:
            verdicts = f"{type(error).__name__}: {error} at line {error.__traceback__.tb_next and error.__traceback__.tb_next.tb_lineno}"
        fine = verdicts == (True, False)
        bad += not fine
        print(f"{number:02d}", "ok" if fine else f"NOT OK {verdicts}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
