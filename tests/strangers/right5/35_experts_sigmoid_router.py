WHAT = "DeepSeek V3 feed-forward: sigmoid router, 2 of 5 experts chosen by score + a balancing bias that is no parameter and does not weigh, tokens sorted by expert, a shared expert besides"
import torch
from torch import nn
from torch.nn import functional as F

EXPERTS, TOP = 5, 2


class Experts(nn.Module):
    def __init__(self, d, ff):
        super().__init__()
        self.router = nn.Linear(d, EXPERTS, bias=False)
        self.register_buffer("balance", torch.linspace(-0.05, 0.05, EXPERTS))
        self.up = nn.ModuleList(nn.Linear(d, ff, bias=False) for _ in range(EXPERTS + 1))  # the last is shared
        self.down = nn.ModuleList(nn.Linear(ff, d, bias=False) for _ in range(EXPERTS + 1))

    def route(self, flat):
        score = self.router(flat).sigmoid()
        chosen = (score + self.balance).topk(TOP, -1).indices
        weight = score.gather(-1, chosen)
        return chosen, weight / weight.sum(-1, keepdim=True)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen, weight = self.route(flat)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        tokens = flat[order // TOP].split(counts)
        parts = [self.down[e](F.silu(self.up[e](t))) for e, t in enumerate(tokens)]
        mixed = torch.cat(parts) * weight.flatten()[order, None]
        routed = torch.zeros_like(flat).index_add(0, order // TOP, mixed)
        return (routed + self.down[-1](F.silu(self.up[-1](flat)))).view_as(x)


from veriformer.properties import Subject


def build(c):
    return Experts(c.d_model, c.d_ff)


def forward(model, x):
    return model(x)


def router(model, x):
    chosen, weight = model.route(x.reshape(-1, x.shape[-1]))
    return torch.zeros(len(chosen), EXPERTS, dtype=weight.dtype, device=x.device).scatter(1, chosen, weight).view(*x.shape[:2], -1)


undeclared = Subject(kind="feed_forward", build=build, forward=forward)
declared = Subject(
    kind="feed_forward", name="sigmoid router", build=build, forward=forward, router=router,
    declares={"norm_topk_prob": True, "activation": "other", "bias": False, "structure": "other", "batch_coupled": False},
)
