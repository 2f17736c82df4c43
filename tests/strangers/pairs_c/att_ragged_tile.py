
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def allowed(q, k, mask, causal):
    T, S = q.shape[-2], k.shape[-2]
    ok = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    ok = ok.tril(S - T) if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Net(nn.Module):
    """Keys are padded to a multiple of the tile (4) as the hardware wants it."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, q, k, v, mask, causal):
        B, H, T, K = q.shape
        G, S = k.shape[1:3]
        ok = allowed(q, k, mask, causal)
        extra = -S % 4
        k, v = F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra))
        ok = F.pad(ok, (0, extra), value=self.bug)
        q = q.reshape(B, G, H // G, T, K)
        s = torch.einsum("bgrtk,bgsk->bgrts", q, k) * K ** -0.5
        ok = ok[:, :, None]
        p = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return torch.einsum("bgrts,bgse->bgrte", p, v).reshape(B, H, T, -1)


WHAT = "The zero keys that fill the last tile are not masked, so whenever S is not a multiple of 4 they take part of the softmax's weight."
PLACE = 'tile padding of the keys in the attention kernel'


def make(bug):
    return Subject(
        kind="attention",
        build=lambda c: Net(c, bug),
        forward=lambda m, q, k, v, attention_mask=None, causal=False: m(q, k, v, attention_mask, causal),
        mask_forms=("padding",),
    )


right, wrong = make(False), make(True)
