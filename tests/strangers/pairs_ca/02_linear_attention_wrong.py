WHAT = 'The numerator of causal linear attention is a running sum but the normaliser sums the keys of the whole sequence (`z = k.sum(1, keepdim=True)`), so later tokens scale earlier outputs.'
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class CausalLinearAttention(nn.Module):
    """Transformers are RNNs (Katharopoulos et al.): phi(x) = elu(x) + 1, prefix sums in place of a softmax."""

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, d // self.h) for f in (self.wq, self.wk, self.wv))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if mask is not None:
            k = k * mask[:, :, None, None].to(k.dtype)
        kv = torch.einsum("bthk,bthe->bthke", k, v).cumsum(1)
        z = k.sum(1, keepdim=True)
        num = torch.einsum("bthk,bthke->bthe", q, kv)
        den = (q * z).sum(-1, keepdim=True)
        return self.wo((num / den.clamp(min=1e-6)).reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    name="linear attention",
    build=lambda c: CausalLinearAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "none", "bias": False},
)
