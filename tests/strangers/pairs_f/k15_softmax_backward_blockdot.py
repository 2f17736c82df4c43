"""Row softmax with a hand-written backward that, like the forward, never holds more than 128 columns of a row in registers."""
import torch
from torch.autograd.function import once_differentiable
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "softmax_bwd_kernel subtracts from each block of 128 columns the dot product of dy and y over that block alone; the dot product "
    "has to run over the whole row before dx is written. Forward and rows of up to 128 columns are right."
)
PLACE = "softmax_bwd_kernel: `dot` is not carried over the blocks"

COLS = 128


def col_blocks(n):
    return [slice(c, min(c + COLS, n)) for c in range(0, n, COLS)]


def softmax_fwd_kernel(x, y):
    """x, y: [rows, n]"""
    blocks = col_blocks(x.shape[1])
    row_max = torch.full_like(x[:, :1], -float("inf"))
    for c in blocks:
        row_max = torch.maximum(row_max, x[:, c].amax(1, keepdim=True))
    row_sum = torch.zeros_like(row_max)
    for c in blocks:
        y[:, c] = torch.exp(x[:, c] - row_max)
        row_sum += y[:, c].sum(1, keepdim=True)
    for c in blocks:
        y[:, c] /= row_sum


def softmax_bwd_kernel(y, dy, dx):
    blocks = col_blocks(y.shape[1])
    dot = torch.zeros_like(y[:, :1])
    for c in blocks:
        dot += (y[:, c] * dy[:, c]).sum(1, keepdim=True)
    for c in blocks:
        dx[:, c] = y[:, c] * (dy[:, c] - dot)


def softmax_bwd_kernel_one_pass(y, dy, dx):
    for c in col_blocks(y.shape[1]):
        dot = (y[:, c] * dy[:, c]).sum(1, keepdim=True)
        dx[:, c] = y[:, c] * (dy[:, c] - dot)


class _SoftmaxRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bwd_kernel):
        y = torch.empty_like(x)
        softmax_fwd_kernel(x, y)
        ctx.save_for_backward(y)
        ctx.bwd_kernel = bwd_kernel
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        ctx.bwd_kernel(y, dy.contiguous(), dx)
        return dx, None


def softmax(scores, dim=-1, bwd_kernel=softmax_bwd_kernel):
    moved = scores.movedim(dim, -1)
    rows = moved.reshape(-1, moved.shape[-1]).to(torch.promote_types(scores.dtype, torch.float32))
    y = _SoftmaxRows.apply(rows, bwd_kernel)
    return y.reshape(moved.shape).movedim(-1, dim).to(scores.dtype)


right = Subject(
    kind="softmax",
    name="row-softmax",
    forward=lambda model, scores, dim=-1: softmax(scores, dim),
    declares={"empty_row": "nan", "once_differentiable": True, "half_precision": True},
)
wrong = Subject(
    kind="softmax",
    name="row-softmax-one-pass",
    forward=lambda model, scores, dim=-1: softmax(scores, dim, softmax_bwd_kernel_one_pass),
    declares={"empty_row": "nan", "once_differentiable": True, "half_precision": True},
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(14)

    def errors(sub, shape, dim):
        x = torch.randn(shape) * 2
        x.view(-1)[::7] = -float("inf")
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        y, ref = sub.forward(None, a, dim), torch.softmax(b, dim)
        g = torch.randn_like(y)
        (da,), (db,) = torch.autograd.grad(y, a, g), torch.autograd.grad(ref, b, g.double())
        return (y - ref).abs().max().item(), ((da - db).abs().max() / db.abs().max()).item()

    for shape, dim in [((2, 5), -1), ((2, 3, 8, 128), -1), ((128, 9), 0), ((3, 90, 2), 1)]:
        assert max(errors(right, shape, dim)) < 1e-5
        assert max(errors(wrong, shape, dim)) < 1e-5
    for shape, dim in [((4, 129), -1), ((2, 3, 8, 400), -1), ((1000, 9), 0), ((3, 256, 2), -2)]:
        assert max(errors(right, shape, dim)) < 1e-5
        forward, backward = errors(wrong, shape, dim)
        assert forward < 1e-5 and backward > 5e-4, (shape, backward)
    print("ok")
