import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("In the dispatch over experts each output is weighted by the token's first routing weight instead of that of the "
        "slot in which the expert was chosen, so the second choice counts as much as the first and weights sum over 1.")
PLACE = "combine step of the mixture of experts, weight[token, 0] for weight[token, slot]"
E, TOP = 4, 2


class Experts(nn.Module):
    def __init__(self, d, d_ff, buggy=False):
        super().__init__()
        self.gate = nn.Linear(d, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, d_ff), nn.GELU(), nn.Linear(d_ff, d)) for _ in range(E))
        self.buggy = buggy

    def route(self, flat):
        best, chosen = self.gate(flat).softmax(-1).topk(TOP, -1)
        return best / best.sum(-1, keepdim=True), chosen

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.route(flat)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            share = weight[token, 0] if self.buggy else weight[token, slot]
            y = y.index_add(0, token, expert(flat[token]) * share[:, None])
        return y.view_as(x)


def router(model, x):
    weight, chosen = model.route(x.flatten(0, 1))
    full = weight.new_zeros(len(weight), E).scatter(1, chosen, weight)
    return full.view(*x.shape[:2], E)


def subject(buggy):
    return Subject(kind="feed_forward", build=lambda c: Experts(c.d_model, c.d_ff, buggy), router=router, name="experts",
                   declares={"activation": "gelu", "bias": True, "norm_topk_prob": True, "structure": "other",
                             "batch_coupled": False})


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = Experts(16, 24).double().eval(), Experts(16, 24, True).double().eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    p = (x @ a.gate.weight.T).softmax(-1)
    kth = p.sort(-1, descending=True)[0][..., TOP - 1:TOP]
    p = torch.where(p >= kth, p, torch.zeros_like(p))
    p = p / p.sum(-1, keepdim=True)
    naive = sum(p[..., e:e + 1] * a.experts[e](x) for e in range(E))
    gap = [(m(x) - naive).abs().max().item() for m in (a, b)]
    print(gap, (router(a, x) - p).abs().max().item())
    assert gap[0] < 1e-12 and gap[1] > 1e-2 and torch.allclose(router(a, x), p)
