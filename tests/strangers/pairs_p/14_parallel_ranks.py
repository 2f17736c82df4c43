"""GPT-J's parallel block as tensor parallel code has it: branches give partial sums, one reduction adds them up."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


def all_reduce(parts: list[Tensor]) -> Tensor:
    """What torch.distributed.all_reduce does, on one machine."""
    return torch.stack(parts).sum(0)


class AttentionBranch(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.v, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor, visible: Tensor) -> Tensor:
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.mT) / q.shape[-1] ** 0.5
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        return self.out(torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2))


class MlpBranch(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, h: Tensor, visible: Tensor) -> Tensor:
        return self.fc_out(nn.functional.gelu(self.fc_in(h), approximate="tanh"))


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), one norm for both."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = AttentionBranch(width, heads)
        self.mlp = MlpBranch(width, inner)

    def visible(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        length = x.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if attention_mask is None:
            return past
        itself = torch.eye(length, dtype=torch.bool, device=x.device)
        return (past & attention_mask.bool()[:, None, None, :]) | itself

    def combine(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        return x + all_reduce(parts)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h, visible = self.ln_1(x), self.visible(x, attention_mask)
        return self.combine(x, [branch(h, visible) for branch in (self.attn, self.mlp)])


class ParallelBlockFusedAdd(ParallelBlock):
    """The residual is added by the branch's own epilogue, which saves a kernel."""

    def combine(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        return all_reduce([x + part for part in parts])


def subject(cls: type[ParallelBlock]) -> Subject:
    return Subject(
        kind="layer",
        name=cls.__name__,
        build=lambda c: cls(c.d_model, c.num_heads, c.d_ff),
        forward=lambda model, x, attention_mask=None: model(x, attention_mask),
        declares={"causal": True, "positions": "none", "residual": True, "norm": "layer", "norm_placement": "pre",
                  "activation": "gelu_tanh"},
    )


right, wrong = subject(ParallelBlock), subject(ParallelBlockFusedAdd)

WHAT = "Each of the two parallel branches adds the residual before the reduction, so that the stream is added twice."
CAUSE = (
    "In combine the stream x is put into every partial sum; all_reduce adds the parts, and the block gives 2 x + attention + mlp: "
    "with silent sublayers it doubles its input."
)
