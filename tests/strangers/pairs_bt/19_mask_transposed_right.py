"""Multi-head self-attention in einsum. Scores have the key before the query: bhst."""
import torch
from torch import einsum, nn

from veriformer.properties import Subject


class EinsumAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        k = d // heads
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(d, heads, k) * d**-0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, k, d) * d**-0.5)
        self.scale = k**-0.5

    def weights(self, x, mask=None):
        q = einsum("btd,dhk->bthk", x, self.wq) * self.scale
        k = einsum("bsd,dhk->bshk", x, self.wk)
        scores = einsum("bshk,bthk->bhst", k, q)
        if mask is not None:
            scores = scores.masked_fill(~self.keys_first(mask), torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-2)

    @staticmethod
    def keys_first(mask):
        """[T, S] or [B, T, S], True = may attend, to what broadcasts against bhst."""
        if mask.dim() == 2:
            mask = mask[None]
        return mask[:, None].transpose(-1, -2)

    def forward(self, x, mask=None):
        v = einsum("bsd,dhk->bshk", x, self.wv)
        y = einsum("bhst,bshk->bthk", self.weights(x, mask), v)
        return einsum("bthk,hkd->btd", y, self.wo)


subject = Subject(
    kind="self_attention",
    name="einsum attention, keys first",
    build=lambda c: EinsumAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("pairwise",),
    weights=lambda m, x, attention_mask=None: m.weights(x, attention_mask).transpose(-1, -2),
    declares={"causal": False, "positions": "none", "bias": False, "empty_row": "mean", "attention_scale": "1/sqrt(d_head)"},
)
