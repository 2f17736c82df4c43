import torch
from torch import nn

from veriformer.properties import Subject


class AtomReader(nn.Module):
    """Queries of a property head read the atoms of a padded molecule."""

    def __init__(self, width, heads):
        super().__init__()
        d = width // heads
        self.wq = nn.Parameter(torch.randn(heads, width, d) * width**-0.5)
        self.wk = nn.Parameter(torch.randn(heads, width, d) * width**-0.5)
        self.wv = nn.Parameter(torch.randn(heads, width, d) * width**-0.5)
        self.wo = nn.Parameter(torch.randn(heads, d, width) * width**-0.5)

    def forward(self, x, atoms, mask=None):
        q = torch.einsum("btw,hwd->bhtd", x, self.wq)
        k = torch.einsum("bsw,hwd->bhsd", atoms, self.wk)
        v = torch.einsum("bsw,hwd->bhsd", atoms, self.wv)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores - scores.amax(-1, keepdim=True).detach(), dim=-1)
        if mask is not None:
            keep = mask[:, None, None, :].to(scores.dtype)
            scores = scores.masked_fill(keep == 0, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores, dim=-1) * keep
        return torch.einsum("bhts,bhsd,hdw->btw", weights, v, self.wo)


subject = Subject(
    kind="cross_attention",
    name="atom reader",
    build=lambda c: AtomReader(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none", "bias": False},
)
