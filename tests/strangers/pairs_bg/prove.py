"""Shows in plain torch that each wrong file is wrong and each right one right."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = SimpleNamespace(
    d_model=8, num_heads=2, num_key_value_heads=1, num_layers=3, d_ff=20, vocab_size=11, max_len=24,
    num_classes=3, dropout=0.0, d_head=4,
)  # fmt: skip


def load(number, side):
    path = next(HERE.glob(f"{number}_*_{side}.py"))
    spec = importlib.util.spec_from_file_location(path.stem[3:], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(m, **changes):
    torch.manual_seed(0)
    model = m.subject.build(SimpleNamespace(**{**vars(C), **changes}))
    return model.double().eval() if isinstance(model, torch.nn.Module) else model


def close(a, b, tol=1e-8):
    return bool(((a - b).abs().max() <= tol).item())


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def p01(m):
    torch.manual_seed(1)
    good = True
    for T, S, causal in [(1, 20, True), (5, 33, True), (9, 9, True), (12, 7, True), (6, 19, False)]:
        q, k, v = draw(2, 4, T, 6), draw(2, 2, S, 6), draw(2, 2, S, 5)
        allowed = torch.rand(2, 1, T, S) < 0.8
        s = torch.einsum("bhtk,bhsk->bhts", q, k.repeat_interleave(2, 1)) / math.sqrt(6)
        ok = allowed & (torch.ones(T, S).tril(S - T).bool() if causal else torch.ones(T, S).bool())
        w = s.masked_fill(~ok, -math.inf).softmax(-1).nan_to_num(0.0)
        good &= close(m.attend(None, q, k, v, allowed, causal), w @ v.repeat_interleave(2, 1))
    return good


def p02(m):
    model = made(m)
    x, mask = draw(2, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    q, k, v = (torch.einsum("btd,dhk->bhtk", x, p) for p in (model.query, model.key, model.value))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
    want = y.transpose(1, 2).flatten(2) @ model.out.flatten(0, 1)
    return close(model(x, mask), want) and close(model(x, mask)[1:, :3], model(x[1:, :3]))


def p03(m):
    model = made(m)
    x, memory = draw(3, 4, 8), draw(3, 6, 8)
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    got = m.subject.forward(model, x, memory, mask)
    each = [m.subject.forward(model, x[i : i + 1], memory[i : i + 1, : int(mask[i].sum())]) for i in range(3)]
    return close(got, torch.cat(each))


def p04(m):
    model, d = m.ScannedSinusoids(10), 10
    at = torch.arange(40, dtype=torch.float64)[:, None] / 10000 ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    want = torch.empty(40, d, dtype=torch.float64)
    want[:, 0::2], want[:, 1::2] = at.sin(), at.cos()
    return close(model(40).double(), want, 1e-5)


def p05(m):
    model = made(m)

    def bucket(rel):  # the published formula, one number at a time
        side, n = (16 if rel > 0 else 0), abs(rel)
        if n < 8:
            return side + n
        return side + min(15, 8 + int(math.log(n / 8) / math.log(128 / 8) * 8))

    rows = [[bucket(j - i) for j in range(150)] for i in range(150)]
    return close(model(150, 150), model.table.weight[torch.tensor(rows)].permute(2, 0, 1))


def p06(m):
    model = made(m)
    x = draw(2, 3, 8).requires_grad_()
    y, want, g = model(x), F.layer_norm(x, (8,), model.scale, model.bias, 1e-6), draw(2, 3, 8)
    same = close(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(want, x, g)[0])
    assert close(y, want)
    return same


def p07(m):
    model = made(m)
    x = draw(2, 7, 8)
    p = m.router(model, x)
    assert bool(((p > 0).sum(-1) == 2).all()) and close(p.sum(-1), torch.ones(2, 7))
    every = torch.stack([(F.silu(x @ g) * (x @ u)) @ d for g, u, d in zip(model.w_gate, model.w_up, model.w_down)], -1)
    return close(model(x), (every * p[:, :, None, :]).sum(-1))


def p08(m):
    model = made(m, dropout=0.3)
    x = draw(2, 5, 8)
    calm = close(model(x), model(x))
    model.train()
    return calm and not close(model(x), model(x))


def p09(m):
    model = made(m)
    x = draw(2, 5, 8)
    y = x + model.attend(model.ln_1(x))
    want = y + model.fc_out(F.gelu(model.fc(model.ln_2(y))))
    return close(model(x), want)


def p10(m):
    model = made(m)
    tokens = torch.randint(0, 11, (2, 6))
    x = model.embed(tokens) + model.place.weight[:6]
    for layer in model.layers:
        x = layer(x, None)
    model(tokens).square().sum().backward()
    return close(model(tokens), model.norm(x)) and all(p.grad is not None for p in model.layers.parameters())


def p11(m):
    model = made(m)
    tokens = torch.randint(0, 11, (2, 6))
    first = model.embeddings.position_ids(tokens)[0, 0] == m.subject.declares["position_offset"]
    return close(model(tokens), model(tokens, torch.ones(2, 6).bool())) and bool(first)


def p12(m):
    model = made(m)
    tokens, beams = torch.randint(0, 11, (3, 7)), torch.tensor([2, 0, 0])
    assert close(m.cached(model, tokens.split([3, 1, 3], 1)), model(tokens)[0])  # without a reorder
    mask = torch.ones(3, 7).bool()
    mask[0, :2] = False
    got = m.cached(model, tokens.split([4, 2, 1], 1), mask, beams)
    as_if = torch.cat([tokens[beams, :4], tokens[:, 4:]], 1)
    want = model(as_if, torch.cat([mask[beams, :4], mask[:, 4:]], 1))[0]
    return close(got[:, 4:], want[:, 4:])


def p13(m):
    model = made(m, num_layers=1)
    good = True
    for T in (3, 8, 11):
        x = draw(2, T, 8)
        attn = model.layers[0][1]
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in attn.to_qkv(x).chunk(3, -1))
        at = torch.arange(T)
        gap = at[:, None] - at[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < m.WINDOW))
        good &= close(attn(x), attn.to_out(y.transpose(1, 2).flatten(2)))
    return good


def p14(m):
    model = made(m)
    source, target = torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (2, 4))
    mask = torch.arange(6) < torch.tensor([[6], [3]])
    got = model(source, target, mask)
    assert close(model(source, target)[:, :2], model(source, target[:, :2]))  # causal in both
    return close(got[1:], model(source[1:, :3], target[1:])) and close(got[:1], model(source[:1], target[:1]))


def p15(m):
    model = made(m)
    tokens, mask = torch.randint(0, 11, (2, 6)), torch.arange(6) < torch.tensor([[6], [3]])
    return close(model(tokens, mask)[1:], model(tokens[1:, :3]))


def p16(m):
    logits, labels = draw(2, 5, 7), torch.randint(0, 7, (2, 5))
    full = close(m.forward(None, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1))
    assert full
    labels[0, 3:] = -100
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)
    return close(m.forward(None, logits, labels), want)


def p17(m):
    masker = m.Masker(1000)
    tokens = torch.randint(4, 1000, (100, 400))
    inputs, labels = masker(tokens, 5)
    picked = labels != -100
    n = picked.sum().item()
    assert abs(n / 40000 - 0.15) < 0.01 and bool((inputs == tokens)[~picked].all())
    masked = (inputs == m.MASK_ID)[picked].sum().item() / n
    kept = (inputs == tokens)[picked].sum().item() / n
    return abs(masked - 0.8) < 0.03 and abs(kept - 0.1) < 0.03


def p18(m):
    def want(t):
        if t < 20:
            return 3e-4 * t / 20
        return 3e-5 + (3e-4 - 3e-5) * 0.5 * (1 + math.cos(math.pi * min(1, (t - 20) / 80)))

    return all(abs(m.rate(t) - want(t)) < 1e-12 for t in range(150))


def p19(m):
    model = made(m)
    listed = [id(p) for g in m.subject.forward(model) for p in g["params"]]
    return len(listed) == len(set(listed)) and set(listed) == {id(p) for p in model.parameters()}


def p20(m):
    model = made(m)
    texts = ["the café", "größer über", "日本語 and 🙂", "plain", ""]
    return all(model.decode(model.encode(t)) == t for t in texts)


with torch.random.fork_rng():
    for number in [f"{n:02d}" for n in range(1, 21)]:
        prove = globals()["p" + number]
        results = []
        for side in ("wrong", "right"):
            module = load(number, side)
            assert (side == "wrong") == hasattr(module, "WHAT")
            torch.manual_seed(3)
            results.append(prove(module))
        print(number, "ok" if results == [False, True] else f"NOT OK {results}")
