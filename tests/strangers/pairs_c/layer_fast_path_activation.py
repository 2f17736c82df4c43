
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def visible(x, mask, causal=False):
    """[B or 1, 1, T, T], True where query t may see key s."""
    T = x.shape[1]
    ok = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
    ok = ok.tril() if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.qkv, self.proj = h, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x, ok):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        ok = ok | ~ok.any(-1, keepdim=True)  # a row without keys takes the mean: finite
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Net(nn.Module):
    """In inference a lighter path is taken, without dropout."""
    def __init__(self, c, bug):
        super().__init__()
        self.fast = F.relu if bug else F.gelu
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, mask=None):
        a = self.attn(x, visible(x, mask))
        if not self.training and not torch.is_grad_enabled():
            x = self.n1(x + a)
            return self.n2(x + self.fc2(self.fast(self.fc1(x))))
        x = self.n1(x + self.drop(a))
        return self.n2(x + self.drop(self.fc2(self.drop(F.gelu(self.fc1(x))))))


WHAT = 'The inference path (eval mode, no gradients) uses ReLU where the model was trained with GELU, so outputs with and without gradients differ.'
PLACE = 'fast path of the layer, activation of the feed-forward'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )


right, wrong = make(False), make(True)
