WHAT = "Checkpoint.backward recomputes the layer without the mask (ctx.run(x) in place of ctx.run(x, ctx.mask)): outputs are right, gradients of a padded batch are those of an unmasked layer"
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, mask, x, *weights):
        ctx.run, ctx.mask, ctx.weights = run, mask, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        wanted = [w for w in ctx.weights if w.requires_grad]
        with torch.enable_grad():
            y = ctx.run(x)
        found = iter(torch.autograd.grad(y, [x, *wanted], grad))
        dx = next(found)
        return None, None, dx, *(next(found) if w.requires_grad else None for w in ctx.weights)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.ln_a, self.ln_m = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
        self.w1, self.w2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def run(self, x, mask=None):
        B, T, D = x.shape
        split = lambda t: t.view(B, T, self.h, -1).transpose(1, 2)
        h = self.ln_a(x)
        m = None if mask is None else mask[:, None, None, :]
        a = F.scaled_dot_product_attention(split(self.wq(h)), split(self.wk(h)), split(self.wv(h)), attn_mask=m)
        x = x + self.wo(a.transpose(1, 2).reshape(B, T, D))
        return x + self.w2(F.gelu(self.w1(self.ln_m(x))))

    def forward(self, x, mask=None):
        return Checkpoint.apply(self.run, mask, x, *self.parameters())


subject = Subject(kind="layer", build=Layer, forward=lambda m, x, attention_mask=None: m(x, attention_mask),
                  declares={"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "gelu", "once_differentiable": True})
