"""Shows in plain torch that of each pair the wrong file is wrong and the right one right."""

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
torch.set_num_threads(1)
SIZES = dict(
    d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=31, max_len=64, num_classes=3, dropout=0.0
)


def load(number, which):
    (path,) = HERE.glob(f"{number}_*_{which}.py")
    name = f"case_{number}_{which}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(module, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = SIZES | sizes
    c = SimpleNamespace(**sizes, d_head=sizes["d_model"] // sizes["num_heads"])
    model = module.subject.build(c)
    return model.eval() if isinstance(model, torch.nn.Module) else model


def rand(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape, seed=1, low=3):
    return torch.randint(low, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=1e-4):
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and (a - b).abs().max().item() < tolerance


def p01(m):
    x = rand(2, 4, 5)
    return all(close(m.subject.forward(None, x, dim=d), torch.softmax(x, d)) for d in (-1, 0, 1))


def p02(m):
    q, k, v = rand(2, 4, 40, 8), rand(2, 2, 40, 8, seed=2), rand(2, 2, 40, 5, seed=3)
    K, V = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return all(
        close(m.subject.forward(None, q, k, v, causal=c), F.scaled_dot_product_attention(q, K, V, is_causal=c))
        for c in (False, True)
    )


def p03(m):
    model, x = make(m), rand(3, 5, 8)
    lengths = [5, 3, 2]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    out = m.subject.forward(model, x, mask)
    return all(close(out[i : i + 1, :n], m.subject.forward(model, x[i : i + 1, :n])) for i, n in enumerate(lengths))


def p04(m):
    model, x, memory = make(m), rand(1, 3, 8), rand(1, 6, 8, seed=2)
    good = True
    for n in (5, 2, 4):
        mask = torch.arange(6)[None] < n
        good &= close(m.subject.forward(model, x, memory, mask), m.subject.forward(model, x, memory[:, :n]))
    return good


def p05(m):
    table = m.subject.forward(make(m), 40)
    expected = torch.tensor(
        [[(math.sin, math.cos)[i % 2](p / 10000 ** (i // 2 * 2 / 8)) for i in range(8)] for p in range(40)]
    )
    return close(table, expected)


def p06(m):
    x, positions = rand(1, 2, 6, 8), torch.tensor([0, 1, 2, 5, 9, 30])
    out = m.subject.forward(make(m, d_model=16), x, positions)
    z = torch.complex(x[..., :4], x[..., 4:])
    angle = positions[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return close(out, torch.cat([z.real, z.imag], -1))


def p07(m):
    model, T = make(m), 30
    out = m.subject.forward(model, T, T)

    def bucket(r):  # the formula of the paper's code, a number at a time
        side, d = (16 if r > 0 else 0), abs(r)
        return side + (d if d < 8 else min(15, 8 + int(math.log(d / 8) / math.log(16) * 8 + 1e-9)))

    w = model.relative_attention_bias.weight
    expected = torch.stack([torch.stack([w[bucket(s - t)] for s in range(T)]) for t in range(T)]).permute(2, 0, 1)
    return close(out, expected)


def p08(m):
    model = make(m)
    with torch.no_grad():
        model.gamma.copy_(1 + rand(8, seed=5))
        model.beta.copy_(rand(8, seed=6))
    x, g = rand(2, 3, 8).requires_grad_(), rand(2, 3, 8, seed=2)
    a = torch.autograd.grad(model(x), (x, model.gamma, model.beta), g)
    b = torch.autograd.grad(F.layer_norm(x, (8,), model.gamma, model.beta), (x, model.gamma, model.beta), g)
    return all(close(p, q) for p, q in zip(a, b))


def p09(m):
    model, x = make(m, dropout=0.5), rand(2, 3, 8)
    return close(model(x), F.relu(x @ model.w_1.weight.T + model.w_1.bias) @ model.w_2.weight.T + model.w_2.bias)


def p10(m):
    model, x = make(m), rand(2, 5, 8)
    a = model.attention
    torch_layer = torch.nn.TransformerEncoderLayer(8, 2, 20, 0.0, "gelu", batch_first=True, norm_first=True)
    with torch.no_grad():
        torch_layer.self_attn.in_proj_weight.copy_(torch.cat([a.to_q.weight, a.to_k.weight, a.to_v.weight]))
        torch_layer.self_attn.in_proj_bias.copy_(torch.cat([a.to_q.bias, a.to_k.bias, a.to_v.bias]))
        torch_layer.self_attn.out_proj.load_state_dict(a.to_out.state_dict())
        torch_layer.linear1.load_state_dict(model.mlp[0].state_dict())
        torch_layer.linear2.load_state_dict(model.mlp[2].state_dict())
    return close(m.subject.forward(model, x), torch_layer(x))


def truncated(m):
    model, tokens = make(m), ids(1, 6)
    mask = torch.arange(6)[None] < 4
    full = m.subject.forward(model, tokens, mask)
    return close(full[:, :4], m.subject.forward(model, tokens[:, :4]))


def p11(m):
    model, tokens = make(m), ids(1, 6)
    same = close(m.subject.forward(model, tokens, torch.ones(1, 6, dtype=torch.bool)), m.subject.forward(model, tokens))
    return same and truncated(m)


def p12(m):
    model, first, second, beams = make(m), ids(3, 4), ids(3, 3, seed=2), torch.tensor([2, 2, 0])
    plain = m.subject.cache(model, [first, second])
    out = m.subject.cache(model, [first, second], None, beams)
    expected = m.subject.forward(model, torch.cat([first[beams], second], 1))[:, 4:]
    whole = m.subject.forward(model, torch.cat([first, second], 1))
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, :2] = mask[2, :1] = False
    masked = m.subject.cache(model, [first, second], mask, beams)[:, 4:]
    moved = torch.cat([mask[beams, :4], mask[:, 4:]], 1)
    padded = m.subject.forward(model, torch.cat([first[beams], second], 1), moved)[:, 4:]
    assert close(plain, whole)
    return close(out[:, 4:], expected) and close(masked, padded)


def p13(m):
    model, a = make(m), ids(1, 6)
    b = a.clone()
    b[0, -1] = (b[0, -1] - 2) % 28 + 3
    return close(m.subject.forward(model, a)[:, :-1], m.subject.forward(model, b)[:, :-1], 1e-5)


def p14(m):
    model, target = make(m), ids(1, 3)
    a = ids(1, 6, seed=2)
    b = a.clone()
    b[0, 4] = (b[0, 4] - 2) % 28 + 3
    seen = (m.subject.forward(model, a, target) - m.subject.forward(model, b, target)).abs().amax(-1)[0]
    x, memory = rand(1, 3, 8), rand(1, 6, 8, seed=3)
    cross = model.decoder[0].cross_attn
    q, k, v = cross.split(cross.W_q(x)), cross.split(cross.W_k(memory)), cross.split(cross.W_v(memory))
    expected = cross.W_o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return bool((seen > 1e-6).all()) and close(cross(x, memory), expected)


def p15(m):
    model, tokens = make(m), ids(1, 6)
    mask = torch.arange(6)[None] < 4
    return close(m.subject.forward(model, tokens, mask), m.subject.forward(model, tokens[:, :4]), 1e-5)


def p16(m):
    logits, labels = rand(2, 5, 7), torch.tensor([[1, 2, 3, -100, -100], [0, 6, 5, 4, -100]])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=-100)
    return close(m.subject.forward(make(m), logits, labels), expected)


def p17(m):
    collator, tokens = make(m, vocab_size=101), torch.randint(3, 101, (4000, 12), generator=torch.Generator().manual_seed(0))
    inputs, labels = m.subject.forward(collator, tokens, 0)
    chosen = labels != -100
    assert abs(chosen.float().mean() - 0.15) < 0.01 and torch.equal(labels[chosen], tokens[chosen])
    words = inputs[chosen & (inputs != 1) & (inputs != tokens)]
    return len(words.unique()) > 95 and abs(words.float().mean() - 50) < 3


def p18(m):
    schedule = make(m)
    for step in range(10, 101):
        expected = 1e-4 + (1e-3 - 1e-4) * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        if abs(m.subject.forward(schedule, step) - expected) > 1e-9:
            return False
    return True


def p19(m):
    model = make(m)
    rate = {id(p): group["weight_decay"] for group in m.subject.forward(model) for p in group["params"]}
    gains = [p for module in model.modules() if isinstance(module, torch.nn.LayerNorm) for p in module.parameters()]
    matrices = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(rate) == len(list(model.parameters()))
    return all(rate[id(p)] == 0 for p in gains) and all(rate[id(p)] > 0 for p in matrices)


def p20(m):
    model = make(m)
    assert len(model.encoder) == 256 + len(model.merges)
    texts = ["the lower river", "the sea", "the lower river", " a low a low", "", "naïve – ✓  x\n\ny", "she", "she sells"]
    return all(model.decode(m.subject.forward(model, text)) == text for text in texts)


if __name__ == "__main__":
    for number in [f"{i:02d}" for i in range(1, 21)]:
        proof = globals()[f"p{number}"]
        with torch.no_grad() if number != "08" else torch.enable_grad():
            right, wrong = proof(load(number, "right")), proof(load(number, "wrong"))
        print(number, "ok" if right and not wrong else f"NOT OK (right {right}, wrong {wrong})")
