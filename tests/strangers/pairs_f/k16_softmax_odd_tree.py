"""Softmax by parallel reduction: per-block (max, sum) pairs, combined pairwise in a tree as a cluster of CTAs would do it."""
import torch
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The tree that combines the per-block statistics pairs neighbours and, at a level with an odd number of nodes, drops the last "
    "one; with 3, 5, 6, 7, 9 ... blocks of 128 the last columns are missing from maximum and denominator and rows sum to more than 1."
)
PLACE = "tree_reduce: the unpaired node is not carried to the next level"

BLOCK = 128


def combine(left, right):
    (m1, s1), (m2, s2) = left, right
    m = torch.maximum(m1, m2)
    base = torch.nan_to_num(m, neginf=0.0, posinf=float("inf"), nan=float("nan"))
    return m, s1 * torch.exp(m1 - base) + s2 * torch.exp(m2 - base)


def tree_reduce(nodes, carry_odd):
    while len(nodes) > 1:
        level = [combine(nodes[i], nodes[i + 1]) for i in range(0, len(nodes) - 1, 2)]
        if carry_odd and len(nodes) % 2:
            level.append(nodes[-1])
        nodes = level
    return nodes[0]


def leaf(block):
    m = block.detach().max(dim=-1, keepdim=True).values
    base = torch.where(m == -torch.inf, torch.zeros_like(m), m)
    return m, torch.exp(block - base).sum(dim=-1, keepdim=True)


class ClusterSoftmax:
    def __init__(self, carry_odd=True):
        self.carry_odd = carry_odd

    def __call__(self, scores, dim=-1):
        out_dtype = scores.dtype
        compute = torch.float64 if out_dtype == torch.float64 else torch.float32
        x = torch.movedim(scores.to(compute), dim, -1)
        m, s = tree_reduce([leaf(block) for block in torch.split(x, BLOCK, dim=-1)], self.carry_odd)
        base = torch.where(m == -torch.inf, torch.zeros_like(m), m)
        return torch.movedim(torch.exp(x - base) / s, -1, dim).to(out_dtype)


right = Subject(
    kind="softmax",
    name="cluster-softmax",
    build=lambda c: ClusterSoftmax(),
    forward=lambda model, scores, dim=-1: model(scores, dim),
    declares={"empty_row": "nan", "half_precision": True},
)
wrong = Subject(
    kind="softmax",
    name="cluster-softmax-odd",
    build=lambda c: ClusterSoftmax(carry_odd=False),
    forward=lambda model, scores, dim=-1: model(scores, dim),
    declares={"empty_row": "nan", "half_precision": True},
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(15)

    def errors(sub, shape, dim, gaps):
        x = torch.randn(shape) * 2
        if gaps:
            x = x.masked_fill(torch.rand(shape) < 0.4, -torch.inf)
            x.movedim(dim, -1)[0, ..., :130] = -torch.inf if x.shape[dim] > 200 else 0.0
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        y, ref = sub.forward(sub.build(DrawnConfig()), a, dim), torch.softmax(b, dim)
        g = torch.randn_like(y)
        (da,), (db,) = torch.autograd.grad(y, a, g), torch.autograd.grad(ref, b, g.double())
        return max((y - ref).abs().max().item(), (da - db).abs().max().item())

    for gaps in (False, True):
        for shape, dim in [((2, 5), -1), ((3, 100), -1), ((3, 256), -1), ((2, 3, 500), -1), ((200, 4), 0), ((4, 1024), -1)]:
            assert errors(right, shape, dim, gaps) < 1e-5
            assert errors(wrong, shape, dim, gaps) < 1e-5, shape
        for shape, dim in [((3, 300), -1), ((3, 330), -1), ((2, 2, 384), -1), ((600, 4), 0), ((4, 700), 1)]:
            assert errors(right, shape, dim, gaps) < 1e-5
            assert errors(wrong, shape, dim, gaps) > 1e-3, shape
    print("ok")
