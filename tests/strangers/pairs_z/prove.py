"""Shows in plain torch that each wrong file is wrong and each right file right: `python prove.py [NN ...]`."""
import copy
import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch.func import functional_call
from torch.nn import functional as F
from veriformer.properties import DrawnConfig

HERE = Path(__file__).parent
torch.set_num_threads(1)
CONFIG = dict(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=13, max_len=32)
TOLERANCE = 1e-9


def load(number, which):
    (path,) = HERE.glob(f"{number}_*_{which}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def made(file, seed=0, train=False, **sizes):
    torch.manual_seed(seed)
    model = file.subject.build(DrawnConfig(**{**CONFIG, **sizes})).double()
    for p in model.parameters():  # unit gain, and no zeros that would hide anything
        with torch.no_grad():
            p.add_(torch.randn_like(p) * 0.2)
    return model.train(train)


def tokens(*shape, seed=1):
    return torch.randint(0, CONFIG["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def same(a, b, tolerance=TOLERANCE):
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


def prefixes_agree(file):
    model, x = made(file), tokens(2, 9)
    whole = file.subject.forward(model, x)
    return all(same(file.subject.forward(model, x[:, :t]), whole[:, :t]) for t in range(1, 9))


def cached_agrees(file, cuts, length=10):
    model, x = made(file), tokens(3, length)
    return same(file.subject.cache(model, list(x.split(cuts, dim=1))), file.subject.forward(model, x))


def p01(file):
    """The gradient of the token embedding is that of the loss as a function of the one matrix used twice."""
    model = made(file, train=True)
    head, table = model.lm_head.weight, model.transformer.wte.weight
    x, y = tokens(2, 6), tokens(2, 6, seed=2)
    model(x, y)[1].backward()
    matrix = table.detach().clone().requires_grad_()
    parameters = {k: v.detach() for k, v in model.named_parameters(remove_duplicate=False)}
    parameters |= {"lm_head.weight": matrix, "transformer.wte.weight": matrix}
    loss = functional_call(model, parameters, (x, y), tie_weights=False)[1]
    (wanted,) = torch.autograd.grad(loss, matrix)
    return head is table and same(table.grad, wanted)


def p02(file):
    return cached_agrees(file, [4, 3, 1, 2]) and cached_agrees(file, 1)


def p03(file):
    """A row is classified as it is alone, without its padding."""
    model, x = made(file), tokens(3, 7)
    lengths = [7, 4, 1]
    mask = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
    padded = file.subject.forward(model, x, mask)
    return all(same(padded[i], file.subject.forward(model, x[i : i + 1, :n])[0]) for i, n in enumerate(lengths))


def p04(file):
    """The bias of the decoder is the table's row of the bucket of i - j, of the encoder's of j - i with its sign."""
    model = made(file)

    def past(d, buckets):
        if d < buckets // 2:
            return d
        exact = buckets // 2
        return min(buckets - 1, exact + int(math.log(d / exact) / math.log(file.MAX_DISTANCE / exact) * (buckets - exact)))

    def both(relative):
        return (file.NUM_BUCKETS // 2 if relative > 0 else 0) + past(abs(relative), file.NUM_BUCKETS // 2)

    T, good = 25, True
    for stack, bucket in ((model.decoder, lambda r: past(max(-r, 0), file.NUM_BUCKETS)), (model.encoder, both)):
        bias = stack.relative_bias(T, T)[0]
        wanted = torch.stack(
            [torch.stack([stack.relative_bias.table.weight[bucket(j - i)] for j in range(T)]) for i in range(T)]
        )
        good &= same(bias, wanted.permute(2, 0, 1))
    # and distances matter to the decoder: what precedes the last token, turned round, gives other outputs
    source, target = tokens(1, 5), torch.tensor([[1, 2, 3, 4]])
    turned = torch.tensor([[3, 2, 1, 4]])
    one = made(file, num_layers=1)
    return good and not same(one(source, target)[:, -1], one(source, turned)[:, -1])


def p05(file):
    """Decoding two sources one after the other gives for each what the whole forward gives."""
    model, target, good = made(file), tokens(2, 6), True
    for seed in (3, 4):
        source = tokens(2, 5, seed=seed)
        cached = file.subject.cache(model, source, list(target.split([2, 1, 3], dim=1)))
        good &= same(cached, file.subject.forward(model, source, target))
        greedy = [file.subject.generate(model, source, 6, use_cache) for use_cache in (False, True)]
        good &= torch.equal(*greedy)
    return good


def p06(file):
    """The weights are the softmax over experts, the two largest renormalised; nothing of the future comes in."""
    model = made(file)
    x = torch.randn(2, 5, CONFIG["d_model"], dtype=torch.float64)
    weights = file.subject.router(model, x)
    for row, token in zip(weights.flatten(0, 1), x.flatten(0, 1)):
        scores = (model.layers[0].block_sparse_moe.gate.weight @ token).exp()
        best = scores.argsort(descending=True)[:2]
        wanted = torch.zeros_like(scores)
        wanted[best] = scores[best] / scores[best].sum()
        if not same(row, wanted):
            return False
    return prefixes_agree(file)


def p07(file):
    """The gradient of the router is that of finite differences."""
    model, x = made(file, train=True), tokens(2, 6)
    direction = torch.randn(2, 6, CONFIG["d_model"], dtype=torch.float64)
    weight = model.layers[0].switch.router.weight
    (model(x) * direction).sum().backward()
    got = torch.zeros_like(weight) if weight.grad is None else weight.grad
    wanted = torch.zeros_like(weight)
    for index in [(0, 0), (1, 3), (2, 7)]:
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight[index] += step
                values.append((model(x) * direction).sum())
                weight[index] -= step
        wanted[index] = (values[0] - values[1]) / 2e-6
        if abs(got[index] - wanted[index]) > 1e-4 * (1 + wanted.abs().max()):
            return False
    return bool(wanted.abs().max() > 1e-3)


def p08(file):
    """What unfold cuts out of the image, and one pixel changes the token of its square alone."""
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    unfolded = F.unfold(images, kernel_size=4, stride=4).transpose(1, 2)  # [B, N, C p p]
    unfolded = unfolded.view(2, 4, 3, 16).transpose(2, 3).reshape(2, 4, 48)
    model = made(file)
    before = file.subject.patches(model, images)
    for row in range(8):
        for column in range(8):
            other = images.clone()
            other[:, :, row, column] += torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
            moved = (file.subject.patches(model, other) - before).abs().amax(dim=(0, 2)) > 1e-9
            wanted = torch.zeros(5, dtype=torch.bool)
            wanted[1 + row // 4 * 2 + column // 4] = True
            if not torch.equal(moved, wanted):
                return False
    return same(file.ToPatches(4)(images), unfolded)


def p09(file):
    """Cached steps are the whole's; and of one layer the whole sees WINDOW inputs."""
    model, x = made(file, num_layers=1), tokens(1, 9)
    changed = x.clone()
    changed[0, 2] = (x[0, 2] + 1) % CONFIG["vocab_size"]
    moved = (file.subject.forward(model, x) - file.subject.forward(model, changed)).abs().amax(-1)[0] > 1e-9
    window = moved.nonzero().flatten().tolist() == list(range(2, 2 + file.WINDOW))
    return window and cached_agrees(file, [3, 4, 3]) and cached_agrees(file, 1)


def p10(file):
    """Attention by loops, with the published slopes 2^(-8i/h), i = 1..h."""
    model = made(file)
    module, x, T, H, K = model.h[0].self_attention, torch.randn(1, 6, 16, dtype=torch.float64), 6, 4, 4
    fused = module.query_key_value(x).view(T, H, 3, K)
    q, k, v = fused.unbind(2)
    wanted = torch.zeros(T, H, K, dtype=torch.float64)
    for h in range(H):
        slope = 2.0 ** (-8 * (h + 1) / H)
        for t in range(T):
            scores = torch.stack([q[t, h] @ k[s, h] / math.sqrt(K) - slope * (t - s) for s in range(t + 1)])
            wanted[t, h] = scores.softmax(0) @ v[: t + 1, h]
    alibi = file.build_alibi_tensor(torch.ones(1, T), H, torch.float64)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    return same(module(x, alibi, hidden), module.dense(wanted.reshape(1, T, 16)))


def p11(file):
    """One attention against the sum over the past, weight by weight; and prefixes."""
    model = made(file)
    attn, x = model.attn[0], torch.randn(1, 6, 16, dtype=torch.float64)
    q, k, v = (w(x).view(6, 4, 4) for w in (attn.w_q, attn.w_k, attn.w_v))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    wanted = torch.zeros(6, 4, 4, dtype=torch.float64)
    for t in range(6):
        for h in range(4):
            weights = torch.stack([q[t, h] @ k[s, h] for s in range(t + 1)])
            wanted[t, h] = weights @ v[: t + 1, h] / (weights.sum() + attn.eps)
    return same(attn(x), attn.w_o(wanted.reshape(1, 6, 16))) and prefixes_agree(file)


def p12(file):
    """Complex multiplication of neighbours; products depend on distances alone."""
    q, k = torch.randn(2, 8, dtype=torch.float64)
    angles = file.sinusoid_angles(10, 8, q)
    at = [file.apply_rotary_pos_emb(z.expand(1, 10, 1, 8), angles)[0, :, 0] for z in (q, k)]
    products = at[0] @ at[1].T
    relative = same(products[1:, 1:], products[:-1, :-1])
    turns = torch.polar(
        torch.ones(10, 4, dtype=torch.float64),
        torch.outer(torch.arange(10.0, dtype=torch.float64), 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)),
    )
    wanted = torch.view_as_real(torch.view_as_complex(q.view(4, 2)) * turns).flatten(-2)
    return relative and same(at[0], wanted)


def p13(file):
    """A layer against Transformer-XL's formula with the encoding of i - j; and prefixes."""
    model, T = made(file), 7
    attn = model.attn[0]
    seen = {}

    def keep(module, given, out):
        seen["in"], seen["out"] = given, out

    handle = attn.register_forward_hook(keep)
    model(tokens(1, T))
    handle.remove()
    w = seen["in"][0][0]
    q, k, v = (z.view(T, 4, 4) for z in attn.qkv_net(w).chunk(3, dim=-1))
    u, vb = model.r_w_bias, model.r_r_bias
    mixed = torch.zeros(T, 4, 4, dtype=torch.float64)
    for i in range(T):
        r = [attn.r_net(model.pos_emb(torch.tensor([float(i - j)], dtype=torch.float64)))[0].view(4, 4) for j in range(i + 1)]
        for h in range(4):
            scores = torch.stack(
                [((q[i, h] + u[h]) @ k[j, h] + (q[i, h] + vb[h]) @ r[j][h]) / 2 for j in range(i + 1)]
            )
            mixed[i, h] = scores.softmax(0) @ v[: i + 1, h]
    wanted = attn.layer_norm(w + attn.o_net(mixed.reshape(T, 16)))
    return same(seen["out"][0], wanted) and prefixes_agree(file)


def p14(file):
    """Each layer has two norms of its own: twice two vectors, and what one learns leaves the other."""
    model = made(file, train=True)
    d, ff, n, v = 16, 24, 2, 13
    counted = sum(p.numel() for p in model.parameters())
    wanted = v * d + n * (4 * (d * d + d) + 2 * d * ff + d + ff + 2 * 2 * d) + 2 * d
    layer = model.encoder.layers[0]
    before = layer.sublayer[1].norm.weight.detach().clone()
    with torch.no_grad():
        layer.sublayer[0].norm.weight += 1
    return counted == wanted and torch.equal(layer.sublayer[1].norm.weight, before)


def p15(file):
    """Padded on the left or not, cached or not: the real tokens give the same; after a reordering, too."""
    model, x, pads = made(file), tokens(3, 9), [0, 3, 2]
    mask = torch.arange(9)[None] >= torch.tensor(pads)[:, None]
    whole = file.subject.forward(model, x, mask)
    cached = file.subject.cache(model, list(x.split([4, 1, 3, 1], dim=1)), mask)
    good = True
    for i, pad in enumerate(pads):
        alone = file.subject.forward(model, x[i : i + 1, pad:])[0]
        good &= same(whole[i, pad:], alone) and same(cached[i, pad:], alone)
    order = [1, 1, 0]
    first, rest = x[:, :4], x[:, 4:]
    got = file.subject.cache(model, [first, rest], mask, order)[:, 4:]
    wanted = file.subject.forward(model, torch.cat((first[order], rest), 1), mask[order])[:, 4:]
    return good and same(got, wanted)


def p16(file):
    """F.cross_entropy over all labels at once."""
    model, good = made(file), True
    for length, hide in ((8, False), (7, False), (8, True), (5, True), (2, False)):
        x, y = tokens(3, length), tokens(3, length, seed=2)
        if hide:
            y[:, : length // 2 - 1] = -100
            y[1, -2:] = -100
        wanted = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        good &= same(file.subject.loss(model, x, y), wanted)
    return good


def p17(file):
    q, k, v = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64)
    mask = torch.full((5, 5), float("-inf"), dtype=torch.float64).triu(1)
    wanted = torch.stack(
        [(5 * torch.tanh(q[0, 0, t] @ k[0, 0, : t + 1].T / 2 / 5)).softmax(0) @ v[0, 0, : t + 1] for t in range(5)]
    )
    return same(file.attend(q, k, v, mask)[0, 0], wanted) and prefixes_agree(file)


def p18(file):
    """In eval a model with dropout is the same as without, and as itself; in training it is not."""
    with_dropout, without, x = made(file, dropout=0.3), made(file, dropout=0.0), tokens(2, 6)
    without.load_state_dict(with_dropout.state_dict())
    good = same(with_dropout(x), without(x)) and torch.equal(with_dropout(x), with_dropout(x))
    with_dropout.train()
    return good and not same(with_dropout(x), with_dropout(x))


def p19(file):
    """Outputs of a padded source are those of the source alone."""
    model, source, target = made(file), tokens(2, 7), tokens(2, 5, seed=2)
    mask = torch.arange(7)[None] < torch.tensor([7, 4])[:, None]
    padded = file.subject.forward(model, source, target, mask)
    alone = file.subject.forward(model, source[1:, :4], target[1:])
    return same(padded[1:], alone)


def p20(file):
    """After a reordering each sample goes on as the one it was told to."""
    model, x, good = made(file), tokens(3, 8), True
    for order in (None, [0, 1, 2], [1, 0, 2], [2, 0, 0], [1, 2, 0]):
        first, rest = x[:, :3], x[:, 3:]
        whole = torch.cat((first if order is None else first[order], rest), dim=1)
        given = torch.tensor(order) if order is not None else None
        got = file.subject.cache(model, [first, *rest.split([1, 3, 1], dim=1)], reorder=given)
        good &= same(got[:, 3:], file.subject.forward(model, whole)[:, 3:])
        good &= same(got[:, :3], file.subject.forward(model, first))
    return good


if __name__ == "__main__":
    chosen = sys.argv[1:] or [f"{n:02d}" for n in range(1, 21)]
    bad = []
    for number in chosen:
        proof = globals()[f"p{number}"]
        verdicts = {}
        for which in ("right", "wrong"):
            torch.manual_seed(7)
            verdicts[which] = bool(proof(load(number, which)))
        fine = verdicts["right"] and not verdicts["wrong"]
        print(number, "ok" if fine else f"NOT OK {verdicts}", flush=True)
        bad += [] if fine else [number]
    sys.exit(1 if bad else 0)
