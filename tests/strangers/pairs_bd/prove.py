"""Shows in plain torch that each wrong file is wrong and each right file right. Each function gives the error of a module
(0 or rounding: right) against a reference of its own."""

import importlib.util
import math
from pathlib import Path

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 20, "vocab_size": 11, "max_len": 32, "num_classes": 3}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(m, **sizes):
    from veriformer.properties import DrawnConfig

    torch.manual_seed(0)
    return m.subject.build(DrawnConfig(**{**SIZES, **sizes}))


def lively(model):
    """Weights of ordinary size, gains and biases drawn."""
    torch.manual_seed(1)
    for p in model.parameters():
        p.data = torch.randn(p.shape, dtype=torch.float64) * (0.5 if p.ndim == 1 else p.shape[-1] ** -0.5)
    return model.double().eval()


def gap(a, b):
    return (a - b).abs().max().item()


def p01(m):
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=torch.float64).mul(3).requires_grad_()
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 2] = -100
    keep = labels != -100
    lse = logits.logsumexp(-1)
    want = F.cross_entropy(logits[keep], labels[keep]) + 1e-3 * lse[keep].square().mean()
    got = m.subject.forward(None, logits, labels)
    assert gap(got, want) < 1e-12
    return gap(torch.autograd.grad(got, logits)[0], torch.autograd.grad(want, logits)[0])


def p02(m):
    torch.manual_seed(0)
    tokens = torch.randint(4, 1000, (200, 100))
    inputs, labels = m.MlmCollator(1000)(tokens, 3)
    chosen = labels != -100
    assert (labels[chosen] == tokens[chosen]).all() and (inputs[~chosen] == tokens[~chosen]).all()
    kept = (inputs[chosen] == tokens[chosen]).double().mean().item()
    return 0.0 if abs(kept - 0.1) < 0.02 and abs(chosen.double().mean() - 0.15) < 0.01 else abs(kept - 0.1)


def p03(m):
    s = m.WarmupCosine()
    want = lambda t: 3e-5 + 2.7e-4 * 0.5 * (1 + math.cos(math.pi * (t - 20) / 180))  # noqa: E731
    return max(abs(s.get_lr(t) - want(t)) for t in range(20, 200)) / 3e-4


def p04(m):
    model = build(m)
    decay = {id(p): g["weight_decay"] for g in m.param_groups_lrd(model) for p in g["params"]}
    assert len(decay) == len(list(model.parameters()))
    return sum((decay[id(p)] > 0) != (p.ndim == 2) for p in model.parameters())


def p05(m):
    texts = ["banana bandana " * 3, "other brother mother"]

    def plain(tokenizer, text):  # merges in the order learnt, nothing kept
        ids = []
        for word in m.pre_tokenize(text):
            symbols = list(word)
            for pair in tokenizer.merges:
                symbols = m.merge(symbols, pair)
            ids += [tokenizer.encoder[s] for s in symbols]
        return ids

    first, second = m.ByteBPE.train(m.CORPUS, 330), m.ByteBPE.train(texts, 280)
    text = "the other mother has a banana"
    return sum(t.encode(text) != plain(t, text) for t in (first, second))


def p06(m):
    t = build(m)

    def best(word):  # every segmentation there is
        if not word:
            return 0.0
        return max(
            (t.log_prob[word[:n]] + best(word[n:]) for n in range(1, len(word) + 1) if word[:n] in t.log_prob),
            default=-math.inf,
        )

    return max(abs(best(w) - sum(t.log_prob[p] for p in t.segment(w))) for w in set(t.words(m.TEXT)))


def p07(m):
    def bucket(d):  # the published rule, in whole numbers and one logarithm
        side, d = (16 if d > 0 else 0), abs(d)
        if d < 8:
            return side + d
        return side + min(15, 8 + int(math.log(d / 8) / math.log(128 / 8) * 8 + 1e-12))

    rel = torch.arange(-200, 201)
    got = build(m).bucket(rel).tolist()
    return sum(a != bucket(d) for a, d in zip(got, rel.tolist()))


def p08(m):
    model = m.PartialRotary(8, 4)
    x, pos = torch.randn(1, 1, 6, 8, dtype=torch.float64), torch.arange(6)
    want = x.clone()
    for i in range(2):
        z = torch.complex(x[..., i], x[..., i + 2]) * torch.exp(1j * pos * 10000.0 ** (-2 * i / 4))
        want[..., i], want[..., i + 2] = z.real, z.imag
    return gap(model(x, pos), want)


def p09(m):
    model = lively(build(m))
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 3, 16, dtype=torch.float64)
    ref = F.layer_norm(x, (16,), model.weight, model.bias, 1e-5)
    assert gap(model(x), ref) < 1e-12
    inputs = (x, model.weight, model.bias)
    return max(
        gap(a, b)
        for a, b in zip(torch.autograd.grad(model(x), inputs, g), torch.autograd.grad(ref, inputs, g), strict=True)
    )


def p10(m):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 5), (2, 40), (2, 40)))
    mask = torch.rand(2, 1, 5, 40) < 0.7
    got = m.attend(None, q, k, v, mask)
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~mask, -torch.inf)
    assert gap(m.attend(None, q, k[:, :, :9], v[:, :, :9]), F.scaled_dot_product_attention(
        q, k[:, :, :9].repeat_interleave(2, 1), v[:, :, :9].repeat_interleave(2, 1))) < 1e-12  # one split: both right
    return gap(got, scores.softmax(-1) @ v.repeat_interleave(2, 1))


def p11(m):
    model = lively(build(m))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    q, k, v = (n(x).view(2, 7, 2, 8) for n in (model.q_net, model.k_net, model.v_net))
    out = torch.zeros(2, 7, 2, 8, dtype=torch.float64)
    for i in range(7):
        r = model.r_net(model.positional_embedding(torch.tensor([float(i - j) for j in range(i + 1)])).double())
        r = r.view(i + 1, 2, 8)
        s = torch.einsum("bnd,bjnd->bnj", q[:, i] + model.r_w_bias, k[:, : i + 1])
        s = s + torch.einsum("bnd,jnd->bnj", q[:, i] + model.r_r_bias, r)
        out[:, i] = torch.einsum("bnj,bjnd->bnd", (s / 8**0.5).softmax(-1), v[:, : i + 1])
    error = gap(model(x), model.o_net(out.flatten(2)))
    prefix = gap(model(x)[:, :4], model(x[:, :4]))  # and causal, by definition
    assert (error < 1e-6) == (prefix < 1e-6)
    return error


def p12(m):
    model = lively(build(m))
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    q, k, v = model.to_qkv(x).view(2, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
    band = torch.ones(11, 11, dtype=torch.bool).tril() & ~torch.ones(11, 11, dtype=torch.bool).tril(-4)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=band).transpose(1, 2).flatten(2)
    return gap(model(x), model.to_out(want))


def p13(m):
    model = lively(build(m))
    x, memory = (torch.randn(3, n, 16, dtype=torch.float64) for n in (4, 6))
    lengths = [6, 2, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    got = model(x, memory, mask)
    return max(gap(got[i : i + 1], model(x[i : i + 1], memory[i : i + 1, :n])) for i, n in enumerate(lengths))


def p14(m):
    model = lively(build(m))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    weights = m.router(model, x)
    assert gap(weights.sum(-1), torch.ones(2, 5)) < 1e-6 and ((weights > 0).sum(-1) == 2).all()
    return gap(model(x), sum(weights[..., e, None] * expert(x) for e, expert in enumerate(model.experts)))


def p15(m):
    model = lively(build(m))
    ref = torch.nn.TransformerEncoderLayer(16, 2, 20, 0.0, batch_first=True, norm_first=True).double().train()
    a = model.self_attn
    with torch.no_grad():
        ref.self_attn.in_proj_weight.copy_(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]))
        ref.self_attn.in_proj_bias.copy_(torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]))
        for mine, theirs in ((a.out_proj, ref.self_attn.out_proj), (model.fc1, ref.linear1), (model.fc2, ref.linear2),
                             (model.self_attn_layer_norm, ref.norm1), (model.final_layer_norm, ref.norm2)):
            theirs.load_state_dict(mine.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    return gap(model(x, ~mask)[mask], ref(x, src_key_padding_mask=~mask)[mask])


def p16(m):
    model = lively(build(m))
    tokens = torch.tensor([[3, 1, 4, 1, 7, 7, 7]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).bool()
    left = model(tokens.roll(3, 1), mask.roll(3, 1))[:, 3:]
    alone = model(tokens[:, :4])
    return max(gap(model(tokens, mask)[:, :4], alone), gap(left, alone))


def p17(m):
    model = lively(build(m))
    tokens = torch.randint(0, 11, (3, 9))
    whole = model(tokens)[0]
    assert gap(m.cached(model, [tokens[:, :9]]), whole) < 1e-9
    order = torch.tensor([2, 0, 0])
    chunks = [tokens[:, :4], tokens[:, 4:5], tokens[:, 5:6], tokens[:, 6:]]
    went_on = model(torch.cat([tokens[order, :4], tokens[:, 4:]], 1))[0][:, 4:]
    return max(gap(m.cached(model, chunks), whole), gap(m.cached(model, chunks, order)[:, 4:], went_on))


def p18(m):
    model = lively(build(m))
    error = 0.0
    for _ in range(2):
        source, target = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 6))
        got = model.decode_in_steps(source, [target[:, :1], target[:, 1:4], target[:, 4:]])
        error = max(error, gap(got, model(source, target)))
    return error


def p19(m):
    model = lively(build(m))
    tokens = torch.tensor([[3, 1, 4, 1, 7, 7, 7]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).bool()
    return gap(model(tokens, mask), model(tokens[:, :4]))


def p20(m):
    model = build(m, max_len=16)
    model(20)
    p, i = torch.arange(24.0)[:, None], torch.arange(8.0)
    angle = p / 10000 ** (2 * i / 16)
    want = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    assert gap(build(m, max_len=16)(16), want[:16]) < 1e-5
    return gap(model(24), want)


if __name__ == "__main__":
    bad = 0
    for n in range(1, 21):
        prove = globals()[f"p{n:02d}"]
        errors = {}
        for side in ("wrong", "right"):
            (path,) = HERE.glob(f"{n:02d}_*_{side}.py")
            torch.manual_seed(0)
            module = load(path)
            assert module.subject.kind and (side == "right" or module.WHAT)
            errors[side] = float(prove(module))
        floor = 2e-5 if n == 20 else 1e-6
        ok = errors["right"] < floor and errors["wrong"] > 1e-4
        bad += not ok
        print(f"{n:02d} {'ok' if ok else 'NOT OK'}  wrong {errors['wrong']:.3g}  right {errors['right']:.3g}")
    raise SystemExit(bad)
