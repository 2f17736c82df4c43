"""Shows in plain torch that the wrong file of each pair is wrong and the right one right."""
import copy
import importlib.util
import math
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent
C = SimpleNamespace(
    d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32, num_classes=3,
    dropout=0.0, d_head=4,
)


def load(stem, side):
    path = next(HERE.glob(f"{stem}_*_{side}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(module, seed=0):
    torch.manual_seed(seed)
    model = module.subject.build(C)
    if isinstance(model, torch.nn.Module):
        model = model.double().eval()
    return model


def near(a, b, tol=1e-8):
    return bool((a - b).abs().max() < tol)


def p01(m):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 50, 8, dtype=torch.float64) * 2 for _ in range(3))
    mask = torch.rand(2, 1, 50, 50) < 0.7
    mask |= torch.eye(50, dtype=torch.bool)
    return all([
        near(m.flash_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)),
        near(m.flash_attention(q, k, v, causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        near(m.flash_attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask)),
        near(m.flash_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9]) * 0, q[:, :, :9] * 0),
    ])


def p02(m):
    pe = model_of(m)(20)
    pos = torch.arange(20, dtype=torch.float64)[:, None]
    rate = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    want = torch.stack([torch.sin(pos * rate), torch.cos(pos * rate)], -1).flatten(1)
    return near(pe.double(), want, 1e-6)


def p03(m):
    rope = model_of(m)
    torch.manual_seed(0)
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64)

    def want(x, p):
        z = torch.complex(x[..., :4], x[..., 4:])
        angle = p.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    a, b = torch.arange(5), torch.arange(5) + 7
    return near(rope(x, a), want(x, a)) and near(rope(x, b), want(x, b))


def p04(m):
    bias = model_of(m)

    def bucket(d):  # after mesh-tensorflow, bidirectional
        half, n = 4, abs(d)
        if n < half // 2:
            b = n
        else:
            b = min(half - 1, half // 2 + int(math.log(n / 2) / math.log(20 / 2) * (half - 2)))
        return b + (half if d > 0 else 0)

    table = bias.relative_attention_bias.weight
    want = torch.stack([torch.stack([table[bucket(j - i)] for j in range(25)]) for i in range(25)]).permute(2, 0, 1)
    return near(bias(25, 25), want)


def p05(m):
    norm = model_of(m)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.uniform_(0.3, 2)
        norm.bias.normal_()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 3, 8, dtype=torch.float64)
    got = torch.autograd.grad(norm(x), (x, norm.weight, norm.bias), up)
    ref = torch.autograd.grad(F.layer_norm(x, (8,), norm.weight, norm.bias), (x, norm.weight, norm.bias), up)
    return all(near(a, b) for a, b in zip(got, ref))


def p06(m):
    layer = model_of(m)
    a = layer.self_attn
    ref = torch.nn.TransformerEncoderLayer(8, 2, 20, 0.0, batch_first=True).double()
    with torch.no_grad():
        ref.self_attn.in_proj_weight.copy_(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]))
        ref.self_attn.in_proj_bias.copy_(torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]))
        ref.self_attn.out_proj.load_state_dict(a.out_proj.state_dict())
        ref.linear1.load_state_dict(layer.fc1.state_dict())
        ref.linear2.load_state_dict(layer.fc2.state_dict())
        ref.norm1.load_state_dict(layer.self_attn_layer_norm.state_dict())
        ref.norm2.load_state_dict(layer.final_layer_norm.state_dict())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    run = m.subject.forward
    return near(run(layer, x), ref(x)) and near(run(layer, x, mask), ref(x, src_key_padding_mask=~mask))


def p07(m):
    model = model_of(m)
    x = torch.randint(11, (3, 5))
    seen = []
    model.transformer_encoder.register_forward_pre_hook(lambda mod, args: seen.append(args[0]))
    out = model(x)
    pos = torch.arange(5, dtype=torch.float64)[:, None]
    rate = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    pe = torch.stack([torch.sin(pos * rate), torch.cos(pos * rate)], -1).flatten(1)
    alone = torch.cat([model(row[None]) for row in x])
    return near(seen[0], model.embedding(x) * math.sqrt(8) + pe, 1e-5) and near(out, alone)


def p08(m):
    model = model_of(m)
    x = torch.randint(11, (2, 10))
    whole = model(x)
    ones = m.cached(model, list(x.split(1, 1)))
    mixed = m.cached(model, [x[:, :5], x[:, 5:8], x[:, 8:]])
    # the window itself: in one layer, token 5 sees 2..5
    one = copy.deepcopy(model)
    one.layers = one.layers[:1]
    y = x.clone()
    y[:, 1] = (y[:, 1] + 1) % 11
    window = near(one(x)[:, 5], one(y)[:, 5]) and not near(one(x)[:, 4], one(y)[:, 4])
    return near(whole, ones) and near(whole, mixed) and window


def p09(m):
    model = model_of(m)
    first, then = torch.randint(11, (3, 4)), torch.randint(11, (3, 2))
    ok = near(m.decode_in_chunks(model, [first, then]), model(torch.cat([first, then], 1)))
    for order in ([1, 0, 0], [2, 0, 1], [0, 0, 2], [1, 2, 0]):
        got = m.decode_in_chunks(model, [first, then], reorder=torch.tensor(order))[:, 4:]
        ok &= near(got, model(torch.cat([first[order], then], 1))[:, 4:])
    return ok


def p10(m):
    model = model_of(m)
    x = torch.randint(11, (2, 6))
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    one = model.to_logits.weight is model.token_emb.weight
    before = model.token_emb.weight.grad.clone()
    # the gradient of one matrix in both roles, functionally
    w = model.token_emb.weight.detach().clone().requires_grad_()
    params = {n: p.detach() for n, p in model.named_parameters()}
    params |= {"token_emb.weight": w, "to_logits.weight": w}
    out = torch.func.functional_call(model, params, (x,), tie_weights=False)
    (grad,) = torch.autograd.grad(F.cross_entropy(out.flatten(0, 1), x.flatten()), w)
    return one and near(before, grad)


def p11(m):
    model = model_of(m)
    x = torch.randint(11, (3, 4))
    ok = True
    for temperature, top_k in product((0.5, 1.0, 2.0), (None, 3)):
        tokens, drawn = m.subject.sampling(model, x, 3, temperature=temperature, top_k=top_k)
        for step in range(3):
            logits = model(tokens[:, : 4 + step])[:, -1] / temperature
            if top_k:
                best = logits.topk(top_k).indices
                logits = torch.full_like(logits, -math.inf).scatter(1, best, logits.gather(1, best))
            ok &= near(drawn[:, step] / drawn[:, step].sum(-1, keepdim=True), logits.softmax(-1))
    return ok


def p12(m):
    model = model_of(m)
    target = torch.randint(11, (2, 6))
    ok = True
    for _ in range(3):
        source = torch.randint(11, (2, 5))
        ok &= near(m.cache(model, source, [target[:, :1], target[:, 1:4], target[:, 4:]]), model(source, target))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    ok &= near(model(source, target, mask)[1], model(source[1:, :3], target[1:])[0])
    return ok


def p13(m):
    model = model_of(m)
    x = torch.randint(11, (2, 5))
    full = torch.ones(2, 5, dtype=torch.bool)
    part = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    return near(model(x), model(x, full)) and near(model(x, part)[1], model(x[1:, :3])[0])


def p14(m):
    loss = model_of(m)
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 7, dtype=torch.float64)
    labels = torch.randint(7, (3, 4))
    ok = True
    for ignored in (0, 3, 7):
        labels.view(-1)[:ignored] = -100
        want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        ok &= near(loss(logits, labels), want)
    return ok and float(loss(logits, torch.full((3, 4), -100))) == 0


def p15(m):
    masker = m.Masker(50)
    tokens = torch.randint(4, 50, (100, 1000))
    inputs, labels = masker(tokens, 3)
    chosen = labels != -100
    again = masker(tokens, 3)
    same = torch.equal(inputs, again[0]) and torch.equal(labels, again[1])
    share = chosen.double().mean()
    kept = (inputs == tokens)[chosen].double().mean()
    special = masker(torch.randint(0, 4, (9, 99)), 1)[1]
    return same and abs(share - 0.15) < 0.005 and abs(kept - 0.102) < 0.01 and bool((special == -100).all())


def p16(m):
    s = m.build(C)
    want = lambda t: 3e-4 * t / 10 if t < 10 else 3e-5 + 2.7e-4 * (1 + math.cos(math.pi * min(1, (t - 10) / 90))) / 2
    return all(abs(m.rate(s, t) - want(t)) < 1e-10 for t in range(150))


def p17(m):
    model = model_of(m)
    groups = m.subject.forward(model)
    held = Counter(id(p) for g in groups for p in g["params"])
    once = set(held.values()) == {1} and set(held) == {id(p) for p in model.parameters()}
    flat = {id(p) for n, p in model.named_parameters() if p.dim() < 2}
    return once and all((g["weight_decay"] == 0) == (id(p) in flat) for g in groups for p in g["params"])


def p18(m):
    text = ["low " * 9 + "abab cdab efab ghab"]  # "lo" of one word that occurs 9 times; "ab" 5 times in 4 words
    merges = m.BytePairEncoder.train(text, 258).merges
    words = Counter(tuple(w) for w in m.pre_tokenize(text[0]))
    counts = Counter()
    for word, n in words.items():
        for pair in zip(word, word[1:]):
            counts[pair] += n
    model = model_of(m)
    trip = all(model.decode(model.encode(t)) == t for t in ("the lowest  gold\n", "żółw 👩‍🔬", ""))
    return counts[merges[0]] == max(counts.values()) and trip


def p19(m):
    t = model_of(m)

    def want(text):
        out = []
        for word in text.split():
            pieces, rest, head = [], word, True
            while rest:
                fit = [n for n in range(len(rest), 0, -1) if (rest[:n] if head else "##" + rest[:n]) in t.vocab]
                if not fit:
                    pieces = ["[UNK]"]
                    break
                pieces.append(rest[: fit[0]] if head else "##" + rest[: fit[0]])
                rest, head = rest[fit[0] :], False
            out += pieces
        return out

    texts = ["unaffable tokenization", "lowx", "playing jazz", "transformers know", "new newness newq"]
    return all(t.tokenize(x) == want(x) for x in texts)


def p20(m):
    t = model_of(m)

    def best(word):
        options = []
        for cuts in product((0, 1), repeat=len(word) - 1):
            pieces, last = [], 0
            for i, cut in enumerate(cuts, 1):
                if cut:
                    pieces.append(word[last:i])
                    last = i
            pieces.append(word[last:])
            if all(p in t.logp for p in pieces):
                options.append(sum(t.logp[p] for p in pieces))
        return max(options)

    words = ["\u2581transforming", "\u2581representation", "\u2581tokenization", "\u2581the"]
    return all(abs(sum(t.logp[p] for p in t.viterbi(w)) - best(w)) < 1e-9 for w in words)


if __name__ == "__main__":
    for number in range(1, 21):
        stem = f"{number:02}"
        test = globals()[f"p{stem}"]
        right, wrong = load(stem, "right"), load(stem, "wrong")
        torch.manual_seed(1)
        good = test(right)
        torch.manual_seed(1)
        bad = test(wrong)
        same = right.subject.kind == wrong.subject.kind and dict(right.subject.declares) == dict(wrong.subject.declares)
        print(stem, "ok" if good and not bad and same and wrong.WHAT else f"NOT OK right={good} wrong={bad} same={same}")
