"""For each pair: the right file holds against an independent reference or the defining relation, the wrong one does not."""
import copy
import importlib.util
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
PROOFS = {}


def proof(function):
    PROOFS[function.__name__[1:3]] = function
    return function


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(mod, seed=0, **sizes):
    """A model in float64 with weights of unit gain."""
    torch.manual_seed(seed)
    model = mod.subject.build(DrawnConfig(**sizes)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3)
            if p.dim() == 1:
                p.add_(1.0)
    return model


def tokens(*shape, seed=1, vocab=11):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def near(a, b, tol=1e-9):
    return a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=tol)


@proof
def _01(mod):
    model = make(mod, num_heads=2, num_key_value_heads=1)
    x = tokens(2, 9)
    return near(mod.subject.cache(model, list(x.split([3, 4, 1, 1], 1))), mod.subject.forward(model, x))


@proof
def _02(mod):
    model = make(mod)
    x, order = tokens(3, 7), torch.tensor([2, 0, 0])
    first, rest = x[:, :3], x[:, 3:]
    got = mod.subject.cache(model, [first, rest[:, :1], rest[:, 1:]], reorder=order)
    want = torch.cat((model(first), model(torch.cat((first[order], rest), 1))[:, 3:]), 1)
    return near(got, want)


@proof
def _03(mod):
    model = make(mod)
    plain = copy.deepcopy(model)
    plain.config.checkpointing = False
    x = tokens(2, 6)
    for m in (model, plain):
        m(x).square().sum().backward()
    same = all(near(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))
    p = model.transformer.h[0].mlp[0].weight  # and against a difference quotient
    with torch.no_grad():
        values = []
        for step in (1e-5, -2e-5):
            p[0, 0] += step
            values.append(model(x).square().sum())
        quotient = (values[0] - values[1]) / 2e-5
    return same and abs(quotient - p.grad[0, 0]) < 1e-4 * max(1, abs(quotient))


@proof
def _04(mod):
    model = make(mod)
    x = tokens(3, 6)
    whole = mod.subject.forward(model, x)
    alone = torch.cat([mod.subject.forward(model, x[i : i + 1]) for i in range(3)])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1] * 6], dtype=torch.bool)
    masked = mod.subject.forward(model, x, mask)
    kept = all(near(masked[i][mask[i]], mod.subject.forward(model, x[i : i + 1, mask[i]])[0]) for i in range(3))
    return near(whole, alone) and kept


@proof
def _05(mod):
    model = mod.subject.build(DrawnConfig())
    one = model.lm_head.weight is model.word_embeddings.weight
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    model(tokens(2, 5)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return one and torch.equal(model.lm_head.weight, model.word_embeddings.weight) and model.lm_head.weight.shape[0] == 11


@proof
def _06(mod):
    model = mod.subject.build(DrawnConfig(d_model=12, num_heads=2))
    torch.manual_seed(0)
    x, at = torch.randn(2, 2, 7, 6, dtype=torch.float64), torch.arange(7)
    pairs = torch.complex(x[..., 0:2], x[..., 2:4])
    angle = at[:, None].double() * torch.tensor([1.0, 10000.0**-0.5], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    want = torch.cat((turned.real, turned.imag, x[..., 4:]), -1)
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64).expand(2, 1, 1, 7, 6)
    scores = model(q, at) @ model(k, at).mT
    relative = near(scores[..., 1:, 1:], scores[..., :-1, :-1])
    return near(model(x, at), want) and relative


@proof
def _07(mod):
    torch.manual_seed(0)
    labels = tokens(3, 5)
    labels[0, 1:3] = -100
    a = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    loss = mod.subject.forward(mod.subject.build(DrawnConfig()), a, labels)
    want = F.cross_entropy(b.flatten(0, 1), labels.flatten())
    (loss / 4).backward()
    (want / 4).backward()
    return near(loss, want) and near(a.grad, b.grad)


@proof
def _08(mod):
    torch.manual_seed(0)
    good = True
    for t, s in ((5, 40), (1, 50), (40, 40), (33, 70), (40, 20)):
        q, k, v = (torch.randn(2, h, n, 4, dtype=torch.float64) for h, n in ((4, t), (2, s), (2, s)))
        for pairwise in (None, torch.rand(2, 1, t, s) < 0.7):
            allowed = torch.ones(t, s, dtype=torch.bool).tril(s - t)[None, None]
            if pairwise is not None:
                allowed = allowed & pairwise
            scores = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(~allowed, float("-inf"))
            want = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)
            good &= near(mod.subject.forward(None, q, k, v, pairwise, True), want)
    return good


@proof
def _09(mod):
    model = make(mod)
    x = tokens(2, 14)
    full = mod.subject.forward(model, x)
    return all(
        near(mod.subject.cache(model, list(x.split(sizes, 1))), full) for sizes in ([1] * 14, [6, 1, 5, 2], [2, 9, 3])
    )


@proof
def _10(mod):
    model = make(mod).eval()
    x = tokens(2, 6)
    with torch.no_grad():
        model(x)
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
        got = model(x)
        linear = model.layers[0].attention.query
        z = torch.randn(3, 8, dtype=torch.float64)
        want = linear.base(z) + 2.0 * F.linear(F.linear(z, linear.lora_A), linear.lora_B)
        part = near(linear(z), want)
    return part and near(got, model(x).detach())


@proof
def _11(mod):
    model = make(mod)
    x = tokens(2, 7)
    mask = torch.arange(7) < torch.tensor([[4], [7]])
    got = mod.subject.forward(model, x, mask)
    return near(got[0, :4], mod.subject.forward(model, x[:1, :4])[0]) and near(got[1:], mod.subject.forward(model, x[1:]))


@proof
def _12(mod):
    model = make(mod)
    x = tokens(2, 8)
    y = mod.subject.forward(model, x)
    return all(near(mod.subject.forward(model, x[:, :n]), y[:, :n]) for n in range(1, 8)) and near(
        mod.subject.forward(model, x[:1]), y[:1]
    )


@proof
def _13(mod):
    torch.manual_seed(0)
    labels = tokens(3, 5)
    labels[1, 2] = -100
    a = torch.randn(3, 5, 11, dtype=torch.float64, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    loss = mod.subject.forward(mod.subject.build(DrawnConfig()), a, labels)
    want = F.cross_entropy(b.flatten(0, 1), labels.flatten())
    loss.backward(), want.backward()
    return near(loss, want) and near(a.grad, b.grad)


@proof
def _14(mod):
    good = True
    for seed in range(6):
        model, x = make(mod, seed=seed), tokens(3, 6, seed=seed, vocab=5)
        good &= torch.equal(mod.subject.generate(model, x, 12, True), mod.subject.generate(model, x, 12, False))
        slow = x
        for _ in range(12):
            slow = torch.cat((slow, model(slow)[:, -1].argmax(-1, keepdim=True)), 1)
        good &= torch.equal(mod.subject.generate(model, x, 12, False), slow)
    return good


@proof
def _15(mod):
    model = make(mod)
    x = tokens(2, 9)
    mask = torch.arange(9) >= torch.tensor([[3], [0]])
    got = mod.subject.cache(model, list(x.split([5, 1, 1, 2], 1)), attention_mask=mask)
    full = mod.subject.forward(model, x, mask)
    alone = mod.subject.forward(model, x[:1, 3:])
    return near(got[0, 3:], alone[0]) and near(full[0, 3:], alone[0]) and near(got[1:], mod.subject.forward(model, x[1:]))


@proof
def _16(mod):
    model, x = make(mod), tokens(4, 5)
    torch.manual_seed(0)
    ids, probs = mod.subject.sampling(model, x, 6, temperature=0.7, top_k=3)
    good = True
    for step in range(6):
        logits = mod.subject.forward(model, ids[:, : 5 + step])[:, -1] / 0.7
        kept = logits.topk(3, dim=-1).indices
        want = torch.zeros_like(logits).scatter(-1, kept, logits.gather(-1, kept).softmax(-1))
        good &= near(probs[:, step], want) and bool((want.gather(-1, ids[:, 5 + step, None]) > 0).all())
    return good


@proof
def _17(mod):
    model = make(mod)
    good = True
    for seed in (1, 2, 3):
        source, target = tokens(2, 6, seed=seed), tokens(2, 5, seed=seed + 10)
        got = mod.subject.cache(model, source, list(target.split([2, 1, 2], 1)))
        good &= near(got, mod.subject.forward(model, source, target))
    return good


@proof
def _18(mod):
    model = make(mod)
    torch.manual_seed(2)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    weights = mod.subject.router(model, x)
    probs = F.softmax(x @ model.gate.weight.T, -1)
    top = probs.topk(2, -1)
    ours = torch.zeros_like(probs).scatter(-1, top.indices, top.values / top.values.sum(-1, keepdim=True))
    want = sum(ours[..., e, None] * model.experts[e](x) for e in range(4))
    return near(weights, ours) and near(mod.subject.forward(model, x), want)


@proof
def _19(mod):
    model = make(mod)
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    want = F.rms_norm(x, (8,), model.gain, 1e-5)
    g = torch.randn_like(x)
    a = torch.autograd.grad(model(x), (x, model.gain), g)
    b = torch.autograd.grad(want, (x, model.gain), g)
    return near(model(x), want) and all(near(p, q) for p, q in zip(a, b))


@proof
def _20(mod):
    model = make(mod, num_layers=3)
    x = tokens(2, 6)
    h = model.word_embeddings(x) + model.position_embeddings.weight[:6]
    for layer in model.layers:
        z = layer.query_key_value(layer.input_layernorm(h)).view(2, 6, 2, 3, 4)
        q, k, v = (part.transpose(1, 2) for part in z.unbind(3))
        scores = q @ k.mT / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
        h = h + layer.dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 6, 8))
        inner = F.gelu(layer.dense_h_to_4h(layer.post_attention_layernorm(h)), approximate="tanh")
        h = h + layer.dense_4h_to_h(inner)
    return near(mod.subject.forward(model, x), model.final_layernorm(h) @ model.word_embeddings.weight.T)


if __name__ == "__main__":
    for number, prove in PROOFS.items():
        (right,), (wrong,) = HERE.glob(f"{number}_*_right.py"), HERE.glob(f"{number}_*_wrong.py")
        verdict = {}
        for name, path in (("right", right), ("wrong", wrong)):
            mod = load(path)
            assert mod.subject.declares == load(right).subject.declares
            verdict[name] = bool(prove(mod))
        ok = verdict["right"] and not verdict["wrong"]
        print(number, "ok" if ok else f"NOT OK: {verdict}")
