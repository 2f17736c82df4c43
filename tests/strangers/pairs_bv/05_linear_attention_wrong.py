WHAT = "the normaliser of causal linear attention sums the keys of the whole sequence, not those up to the query, so every output is divided by something that depends on the future (line 25: z = torch.einsum('bthk,bhk->bth', q, k.sum(dim=1)))"
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class CausalLinearAttention(nn.Module):
    """Katharopoulos et al. 2020, feature map elu + 1."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if attention_mask is not None:
            k = k * attention_mask[:, :, None, None].to(k.dtype)
        state = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(dim=1)
        z = torch.einsum("bthk,bhk->bth", q, k.sum(dim=1))
        y = torch.einsum("bthk,bthkv->bthv", q, state) / z.clamp(min=1e-6)[..., None]
        return self.out(y.reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    build=lambda c: CausalLinearAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "none", "bias": False},
)
