"""Mixture of experts, two experts a token."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "Expert results are assigned to the output rows rather than added, so of a token's two experts the one with the higher index wins."
PLACE = "combination of the experts' outputs"


def add(out, rows, y):
    return out.index_add(0, rows, y)


def put(out, rows, y):
    return out.index_copy(0, rows, y)


class MoE(nn.Module):
    def __init__(self, d, ff, combine, experts=4):
        super().__init__()
        self.combine = combine
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d)) for _ in range(experts))

    def route(self, x):  # [N, D] -> [N, E], two nonzero
        p = self.gate(x).softmax(-1)
        top, idx = p.topk(2, -1)
        return torch.zeros_like(p).scatter(-1, idx, top / top.sum(-1, keepdim=True))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        w, out = self.route(flat), torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            rows = (w[:, e] > 0).nonzero().flatten()
            y = w[rows, e, None] * expert(flat[rows])
            out = self.combine(out, rows, y.to(out.dtype))
        return out.view_as(x)


def subject(combine):
    return Subject(kind="feed_forward", build=lambda c: MoE(c.d_model, c.d_ff, combine), forward=lambda m, x: m(x),
                   router=lambda m, x: m.route(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1),
                   declares={"norm_topk_prob": True, "activation": "relu", "bias": True, "structure": "other"})


right, wrong = subject(add), subject(put)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = MoE(8, 16, add), MoE(8, 16, put)
    z.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 8)
    want = torch.zeros_like(x)
    for b in range(2):
        for t in range(5):
            p = F.softmax(a.gate.weight @ x[b, t], -1)
            i, j = p.argsort(descending=True)[:2].tolist()
            want[b, t] = (p[i] * a.experts[i](x[b, t]) + p[j] * a.experts[j](x[b, t])) / (p[i] + p[j])
    dr, dw = (a(x) - want).abs().max().item(), (z(x) - want).abs().max().item()
    print(dr, dw)
    assert dr < 1e-5 and dw > 1e-2
