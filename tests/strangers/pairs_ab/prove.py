"""Shows in plain torch that every wrong file is wrong and every right one right."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = dict(
    d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=13, max_len=32, num_classes=3,
    dropout=0.0, d_head=4,
)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module, shake=True, **sizes):
    torch.manual_seed(0)
    model = module.subject.build(SimpleNamespace(**{**SIZES, **sizes}))
    if isinstance(model, torch.nn.Module):
        model = model.double().eval()
        if shake:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.3 * torch.randn_like(p))
    return model


def tokens(*shape, seed=1):
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, atol=1e-9, rtol=1e-7)


def p01(m):
    """Cached and reordered = the reordered prompt, whole."""
    model, a, b = make(m), tokens(3, 4), tokens(3, 2, seed=2)
    good = True
    for order in ([1, 0, 2], [2, 2, 0], [1, 2, 0]):
        got = m.run_cached(model, [a, b], torch.tensor(order))[:, 4:]
        good &= close(got, model(torch.cat((a[order], b), 1))[:, 4:])
    plain = close(m.run_cached(model, [a, b]), model(torch.cat((a, b), 1)))
    assert plain
    return good


def p02(m):
    """Standard deviation of the residual projections: 0.02 / sqrt(2 * 8)."""
    model = make(m, shake=False, d_model=64, num_layers=8, d_ff=128)
    std = torch.cat([p.flatten() for b in model.blocks for p in (b.attn.out_proj.weight, b.mlp.down_proj.weight)]).std()
    other = torch.cat([b.attn.qkv.weight.flatten() for b in model.blocks]).std()
    assert abs(other / 0.02 - 1) < 0.05
    return abs(std / (0.02 / 4) - 1).item() < 0.05


def p03(m):
    """One layer: output t depends on inputs t-3 .. t and on nothing else; and equals dense banded attention."""
    model, idx = make(m, num_layers=1), tokens(1, 11)
    model.token_emb.weight.requires_grad_(True)
    emb = model.token_emb(idx).detach().requires_grad_(True)
    out = _with_embeddings(model, emb)
    seen = torch.stack([torch.autograd.grad(out[0, t].sum(), emb, retain_graph=True)[0][0].abs().sum(-1) > 0 for t in range(11)])
    t = torch.arange(11)
    return torch.equal(seen, (t[None] <= t[:, None]) & (t[:, None] - t[None] < 4))


def _with_embeddings(model, emb):
    x = emb + model.pos_emb(torch.arange(emb.shape[1]))
    for attn, ff in model.layers:
        x = attn(x) + x
        x = ff(x) + x
    w = torch.linspace(1, 2, 13, dtype=torch.float64)
    return model.to_logits(x) * w


def p04(m):
    """A sample in a padded batch = the sample alone."""
    model, idx = make(m), tokens(3, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    out = model(idx, mask)
    return all(close(out[b][mask[b]], model(idx[b][mask[b]][None])[0]) for b in range(3))


def p05(m):
    """With and without gradients the same, source after source."""
    model = make(m)
    for seed in range(3):
        s, t = tokens(2, 5, seed=seed), tokens(2, 4, seed=seed + 9)
        with torch.no_grad():
            got = model(s, t)
        if not close(got, model(s, t).detach()):
            return False
    return True


def p06(m):
    """The gradient with and without checkpointing, same seed."""
    model, idx = make(m, dropout=0.3).train(), tokens(2, 5)
    grads, outs = [], []
    for on in (True, False):
        model.checkpoint_activations = on
        model.zero_grad()
        torch.manual_seed(3)
        out = model(idx)
        outs.append(out.detach())
        out.pow(3).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert close(*outs)
    return close(*grads)


def p07(m):
    """Eval = training (no dropout), and W + B A * alpha / r."""
    model, idx = make(m), tokens(2, 5)
    lora = model.layer[0].attention.query
    x = randn(3, 16)
    good = close(lora(x), F.linear(x, lora.weight + 2.0 * torch.einsum("or,ri->oi", lora.lora_B, lora.lora_A), lora.bias))
    return good and close(model.eval()(idx), model.train()(idx))


def p08(m):
    """One parameter, the gradient of both uses in it; Adam steps like a model with functional tying."""
    model = make(m, shake=False)
    names = {n for n, _ in model.named_parameters()}
    if "output.weight" in names or model.output.weight is not model.tok_embeddings.weight:
        single = m.Transformer(m.ModelArgs(16, 1, 4, 2, 13, 24))  # and the tie is lost in .double()
        with torch.no_grad():
            single.double().tok_embeddings.weight.add_(1.0)
        return torch.equal(single.output.weight, single.tok_embeddings.weight)
    return True


def p09(m):
    """Left-padded and cached = unpadded and whole."""
    model, idx = make(m), tokens(1, 7)
    whole = model(idx)[0]
    padded = torch.cat((tokens(1, 3, seed=5), idx), 1)
    mask = torch.cat((torch.zeros(1, 3), torch.ones(1, 7)), 1).bool()
    assert close(model(padded, mask)[0][:, 3:], whole)
    got = m.run_cached(model, [padded[:, :6], padded[:, 6:7], padded[:, 7:]], mask)
    assert close(m.run_cached(model, [idx[:, :4], idx[:, 4:]]), whole)
    return close(got[:, 3:], whole)


def p10(m):
    """top_k = 3: three tokens of every row are left, the three best."""
    model, idx = make(m), tokens(4, 5)
    out, logits = m.sample(model, idx, 3, temperature=0.7, top_k=3)
    good = bool((logits.isfinite().sum(-1) == 3).all())
    first = model(idx)[:, -1] / 0.7
    best = first.topk(3, dim=-1).indices.sort(-1).values
    kept = [row.isfinite().nonzero().flatten() for row in logits[:, 0]]
    return good and all(torch.equal(a, b) for a, b in zip(kept, best))


def p11(m):
    """Complex numbers times exp(i p base^(-2j / rotary_dim))."""
    rotary, x, p = make(m, d_head=10), randn(2, 3, 6, 10), torch.arange(6) * 7
    z = torch.complex(x[..., :2], x[..., 2:4])
    angle = p[:, None] * torch.tensor([1.0, 10000.0 ** (-2 / 4)], dtype=torch.float64)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return close(rotary(x, p), torch.cat((z.real, z.imag, x[..., 4:]), -1))


def dense(q, k, v, causal, mask=None):
    rep = q.shape[1] // k.shape[1]
    k = torch.stack([k[:, h // rep] for h in range(q.shape[1])], 1)
    v = torch.stack([v[:, h // rep] for h in range(q.shape[1])], 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        T, S = s.shape[-2:]
        s = s.masked_fill(torch.arange(S) > torch.arange(T)[:, None] + S - T, -torch.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return s.softmax(-1).nan_to_num() @ v


def p12(m):
    """Dense attention."""
    good = True
    for T, S in ((1, 1), (5, 5), (9, 9), (3, 8), (8, 3)):
        q, k, v = randn(2, 4, T, 6), randn(2, 2, S, 6, seed=2), randn(2, 2, S, 5, seed=3)
        mask = torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(0)) > 0.3
        assert close(m.tiled_attention(q, k, v), dense(q, k, v, False))
        assert close(m.tiled_attention(q, k, v, mask), dense(q, k, v, False, mask))
        good &= close(m.tiled_attention(q, k, v, None, True), dense(q, k, v, True))
        good &= close(m.tiled_attention(q, k, v, mask, True), dense(q, k, v, True, mask))
    return good


def p13(m):
    """Gradients of dense attention by autograd."""
    inputs = [z.requires_grad_() for z in (randn(2, 4, 5, 6), randn(2, 2, 5, 6, seed=2), randn(2, 2, 5, 3, seed=3))]
    a, b = m.attention(*inputs, causal=True), dense(*inputs, True)
    assert close(a, b)
    w = randn(*a.shape, seed=4)
    return all(close(x, y) for x, y in zip(torch.autograd.grad((a * w).sum(), inputs), torch.autograd.grad((b * w).sum(), inputs)))


def p14(m):
    """Output and gradients of F.layer_norm."""
    model, x = make(m), randn(2, 3, 16).requires_grad_()
    a, b = model(x), F.layer_norm(x, (16,), model.weight, model.bias, 1e-5)
    assert close(a, b)
    w, to = randn(2, 3, 16, seed=2), (x, model.weight, model.bias)
    return all(close(p, q) for p, q in zip(torch.autograd.grad((a * w).sum(), to), torch.autograd.grad((b * w).sum(), to)))


def p15(m):
    """Each token alone gives what it gives in the sequence; and a reference in integers."""
    model, x = make(m), randn(2, 5, 16) * torch.tensor([1.0, 0.1, 3.0, 0.5, 2.0])[:, None].double()
    whole = model(x)
    alone = torch.stack([torch.stack([model(x[b : b + 1, t : t + 1])[0, 0] for t in range(5)]) for b in range(2)])

    def product(x, lin):
        sx, sw = x.abs().amax(-1, keepdim=True) / 127, lin.weight.abs().amax(1) / 127
        return ((x / sx).round().long() @ (lin.weight / sw[:, None]).round().long().T) * sx * sw + lin.bias

    return close(whole, alone) and close(whole, product(product(x, model.up).relu(), model.down))


def p16(m):
    """A sample of a batch with its own padding = the sample alone, without its padding."""
    model, x, memory = make(m), randn(3, 4, 16), randn(3, 6, 16, seed=2)
    mask = torch.arange(6)[None] < torch.tensor([6, 3, 2])[:, None]
    out = m.subject.forward(model, x, memory, memory_mask=mask)
    return all(close(out[b], model(x[b : b + 1], memory[b : b + 1, mask[b]])[0]) for b in range(3))


def p17(m):
    """In eval twice the same, and the same as dense attention; in training random."""
    model, x = make(m, dropout=0.4), randn(2, 5, 16)
    assert not close(model.train()(x), model(x))
    model.eval()
    heads = [f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (model.q, model.k, model.v)]
    want = model.proj(dense(*heads, True).transpose(1, 2).flatten(2))
    return close(model(x), model(x)) and close(model(x), want)


def p18(m):
    """x + A(LN x), then + F(LN ...), written out."""
    model, x = make(m), randn(2, 5, 16)
    x1 = x + model.self_attn(model.layer_norm1(x))
    return close(model(x), x1 + model.fc2(F.gelu(model.fc1(model.layer_norm2(x1)))))


def p19(m):
    """F.cross_entropy, and its gradient when the loss is multiplied."""
    logits, labels = randn(3, 7, 13).requires_grad_(), tokens(3, 7)
    labels[0, :4] = -100
    a = m.cross_entropy(logits, labels)
    b = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert close(a, b)
    ga, gb = torch.autograd.grad(a, logits, retain_graph=True)[0], torch.autograd.grad(b, logits, retain_graph=True)[0]
    assert close(ga, gb)
    return close(torch.autograd.grad(a / 4, logits)[0], torch.autograd.grad(b / 4, logits)[0])


def p20(m):
    """All experts on all tokens, mixed by the router's weights."""
    model, x = make(m), randn(2, 5, 16)
    every = torch.stack([expert(x) for expert in model.experts], dim=-2)
    return close(model(x), (m.router(model, x)[..., None] * every).sum(-2))


if __name__ == "__main__":
    for number in range(1, 21):
        key = f"{number:02d}"
        (wrong,), (right,) = (list(HERE.glob(f"{key}_*_{side}.py")) for side in ("wrong", "right"))
        verdicts = []
        for path in (wrong, right):
            module = load(path)
            assert module.subject.kind and (path == right or module.WHAT)
            with torch.enable_grad():
                verdicts.append(bool(globals()[f"p{key}"](module)))
        print(key, "ok" if verdicts == [False, True] else f"NOT PROVED {verdicts}")
