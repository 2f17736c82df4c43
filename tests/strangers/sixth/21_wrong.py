import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


class PerceiverCrossAttend(nn.Module):
    """Latents x read from an input array; q from the one, fused k and v from the other."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, dim * 2, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self._heads(self.to_q(x))
        k, v = map(self._heads, self.to_kv(context).chunk(2, dim=-1))
        if mask is not None:
            mask = mask[:, None, None, :]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout
        )
        if mask is not None:
            out = out * mask.any(-1, keepdim=True)  # nothing to read: nothing is read
        return self.to_out(out.transpose(1, 2).flatten(2))


def projections(m):
    k, v = m.to_kv.weight.data.chunk(2)
    return {"q": m.to_q.weight.data, "k": k, "v": v, "o": m.to_out.weight.data}


subject = Subject(
    kind="cross_attention",
    name="PerceiverCrossAttend",
    build=lambda c: PerceiverCrossAttend(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    projections=projections,
    declares={
        "positions": "none",
        "attention_scale": "1/sqrt(d_head)",
        "bias": False,
        "init": "default",
        "empty_row": "zeros",
        "residual": False,
    },
)
