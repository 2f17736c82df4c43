import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

WHAT = ("The convolutional feed-forward (kernel 3) reads padded positions, which are not zero after the attention and its "
        "norm: the mask is not applied before the convolution, so the last real position depends on the padding.")
PLACE = "feed-forward sublayer, input of the convolution"


class FFTBlock(nn.Module):
    """The feed-forward Transformer block of FastSpeech: self-attention, then a convolution over time."""

    def __init__(self, d, heads, d_ff, buggy=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.wide, self.back = nn.Conv1d(d, d_ff, 3, padding=1), nn.Conv1d(d_ff, d, 1)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.heads, self.buggy = heads, buggy

    def attend(self, x, mask):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], torch.finfo(s.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x, attention_mask=None):
        mask = None if attention_mask is None else attention_mask.bool()
        x = self.n1(x + self.attend(x, mask))
        z = x
        if mask is not None and not self.buggy:
            z = x.masked_fill(~mask[..., None], 0.0)
        z = self.back(F.relu(self.wide(z.transpose(1, 2)))).transpose(1, 2)
        return self.n2(x + z)


def subject(buggy):
    return Subject(kind="layer", build=lambda c: FFTBlock(c.d_model, c.num_heads, c.d_ff, buggy), mask_forms=("padding",),
                   declares={"causal": False, "norm": "layer", "norm_placement": "post", "activation": "relu",
                             "residual": True, "positions": "other", "bias": True, "structure": "other"}, name="fft block")


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = FFTBlock(16, 2, 32).double().eval(), FFTBlock(16, 2, 32, True).double().eval()
    b.load_state_dict(a.state_dict())
    short = torch.randn(1, 5, 16, dtype=torch.float64)
    h = F.layer_norm(short + a.attend(short, None), (16,))
    pad = F.pad(h, (0, 0, 1, 1))
    u = sum(pad[:, i:i + 5] @ a.wide.weight[:, :, i].T for i in range(3)) + a.wide.bias
    naive = F.layer_norm(h + u.clamp(min=0) @ a.back.weight[:, :, 0].T + a.back.bias, (16,))
    padded = torch.cat([short, torch.randn(1, 3, 16, dtype=torch.float64)], 1)
    mask = torch.arange(8)[None] < 5
    gap = [(m(padded, mask)[:, :5] - naive).abs().amax((0, 2)).tolist() for m in (a, b)]
    print((a(short) - naive).abs().max().item(), gap)
    assert (a(short) - naive).abs().max() < 1e-12 and max(gap[0]) < 1e-12
    assert max(gap[1][:4]) < 1e-12 and gap[1][4] > 1e-2
