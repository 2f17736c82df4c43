"""Online softmax over long rows: running maximum and denominator in one pass, then one pass that writes."""
import torch
from veriformer.properties import Subject

WHAT = (
    "Each block of 256 scores is exponentiated against its own maximum and added to a denominator that is kept relative to the "
    "running maximum, so a block whose maximum is below that of an earlier block weighs too much and rows sum to less than 1."
)
PLACE = "online_softmax: `(x - m_block).exp()` instead of `(x - m_new).exp()` in the denominator's pass"

BLOCK = 256


def online_softmax(scores, dim=-1, own_base=False):
    x = scores.movedim(dim, -1)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    blocks = x.split(BLOCK, dim=-1)

    # pass 1: m and d, read every score once
    m = d = None
    for block in blocks:
        m_block = block.detach().amax(-1, keepdim=True)
        m_new = m_block if m is None else torch.maximum(m, m_block)
        safe = m_new.masked_fill(m_new == float("-inf"), 0.0)
        base = m_block.masked_fill(m_block == float("-inf"), 0.0) if own_base else safe
        d_block = (block - base).exp().sum(-1, keepdim=True)
        d = d_block if d is None else d * (m - safe).exp() + d_block
        m = m_new

    # pass 2: write
    m = m.masked_fill(m == float("-inf"), 0.0)
    y = torch.cat([(block - m).exp() / d for block in blocks], dim=-1)
    return y.movedim(-1, dim).to(scores.dtype)


right = Subject(
    kind="softmax",
    name="online-softmax",
    forward=lambda model, scores, dim=-1: online_softmax(scores, dim),
    declares={"empty_row": "nan", "half_precision": True},
)
wrong = Subject(
    kind="softmax",
    name="online-softmax-own-base",
    forward=lambda model, scores, dim=-1: online_softmax(scores, dim, own_base=True),
    declares={"empty_row": "nan", "half_precision": True},
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(12)

    def errors(sub, shape, dim, hide=False):
        x = torch.randn(shape) * 3
        if hide:
            x = x.masked_fill(torch.rand(shape) < 0.3, float("-inf"))
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        y, ref = sub.forward(None, a, dim=dim), torch.softmax(b, dim)
        g = torch.randn_like(y)
        (da,), (db,) = torch.autograd.grad(y, a, g), torch.autograd.grad(ref, b, g.double())
        return max(((y - ref).abs().amax() / ref.abs().amax()).item(), (da - db).abs().max().item())

    for hide in (False, True):
        for shape, dim in [((3, 7), -1), ((2, 4, 9, 256), -1), ((100, 5), 0), ((2, 200, 3), 1)]:
            assert errors(right, shape, dim, hide) < 1e-5
            assert errors(wrong, shape, dim, hide) < 1e-5
        for shape, dim in [((50, 300), -1), ((2, 3, 1000), -1), ((700, 20), 0), ((2, 512, 5), 1)]:
            assert errors(right, shape, dim, hide) < 1e-5
            assert errors(wrong, shape, dim, hide) > 1e-2, shape
    x = torch.full((2, 600), float("-inf"))
    assert right.forward(None, x).isnan().all() and wrong.forward(None, x).isnan().all()
    print("ok")
