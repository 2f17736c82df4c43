"""A kernel whose tiles hold head widths of up to 64 as they are, and wider ones padded to a multiple of 64 (heads of 80,
96 or 160 as Phi, GPT-NeoX and Stable Diffusion have them), in the style of a company's CUDA kernel and its Python
launcher."""

import torch
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = (
    "The scale is taken inside the kernel from the padded width: heads of 80 are scaled with 1/sqrt(128). Up to a width "
    "of 64, and at multiples of 64, the scale is that of the head; in between scores are too small by up to a third."
)
PLACE = "make: `scale` of the padded query"
WIDTH, KEYS = 64, 32


def pad_width(x):
    over = -x.shape[-1] % WIDTH if x.shape[-1] > WIDTH else 0
    return F.pad(x, (0, over)) if over else x


def kernel(q, k, v, allowed, scale):
    """Tiles of keys, an online softmax; all widths fit the tile."""
    top = torch.full_like(q[..., :1], torch.finfo(q.dtype).min / 4)
    norm, acc = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    for at in range(0, k.shape[-2], KEYS):
        see = allowed[..., at : at + KEYS]
        x = q @ k[..., at : at + KEYS, :].mT * scale
        x = x.masked_fill(~see, torch.finfo(q.dtype).min / 4)
        new = torch.maximum(top, x.detach().amax(-1, keepdim=True))
        p, shrink = (x - new).exp() * see, (top - new).exp()
        norm, acc, top = norm * shrink + p.sum(-1, keepdim=True), acc * shrink + p @ v[..., at : at + KEYS, :], new
    return acc / torch.where(norm == 0, torch.ones_like(norm), norm)


def make(scale_of):
    def launch(model, q, k, v, attention_mask=None, causal=False):
        t, s, width = q.shape[2], k.shape[2], v.shape[-1]
        allowed = torch.ones(1, 1, t, s, dtype=torch.bool, device=q.device)
        if causal:
            allowed = allowed.tril()
        if attention_mask is not None:
            mask = attention_mask.bool()
            allowed = allowed & (mask if mask.dim() == 2 else mask[:, None])
        wide = torch.promote_types(q.dtype, torch.float32)
        padded = [pad_width(x.to(wide)) for x in (q, k, v)]
        return kernel(*padded, allowed, scale_of(q, padded[0]))[..., :width].to(q.dtype)

    return Subject(
        kind="attention",
        name="padded heads",
        forward=launch,
        mask_forms=("pairwise",),
        declares={"attention_scale": "1/sqrt(d_head)", "empty_row": "zeros", "causal_alignment": "top-left"},
    )


right = make(lambda q, padded: q.shape[-1] ** -0.5)
wrong = make(lambda q, padded: padded.shape[-1] ** -0.5)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for width, t, s, causal in ((4, 5, 9, False), (64, 40, 40, True), (128, 9, 40, False), (80, 40, 40, True), (96, 7, 9, False), (160, 3, 50, False)):
            q, k, v = (torch.randn(2, 2, n, width).to(dtype) for n in (t, s, s))
            mask = torch.rand(2, t, s) > 0.3
            truth = F.scaled_dot_product_attention(
                q.double(), k.double(), v.double(),
                mask[:, None] & (torch.ones(t, s).tril().bool() if causal else torch.tensor(True)),
            )  # fmt: skip
            none = ~(mask & (torch.ones(t, s).tril().bool() if causal else torch.tensor(True))).any(-1)[:, None, :, None]
            truth = truth.masked_fill(none, 0)
            a, b = ((f.forward(None, q, k, v, mask, causal) - truth).abs().max().item() for f in (right, wrong))
            print(dtype, "width", width, f"right {a:.1e} wrong {b:.1e}")
            assert a < small and (b > 0.1 if width in (80, 96, 160) else b < small)
