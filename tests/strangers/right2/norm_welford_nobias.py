"""LayerNorm without a bias, mean and variance by Welford's running update over the channels. Unusual: a loop over channels
and no shift parameter; right, Welford is exact and stable (Cohere's and PaLM's norms have no bias)."""
import torch
from torch import nn
from veriformer.properties import Subject


class Welford(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.gain = nn.Parameter(torch.ones(d))

    def forward(s, x):
        mean, m2 = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for n, v in enumerate(x.unbind(-1), 1):
            delta = v - mean
            mean = mean + delta / n
            m2 = m2 + delta * (v - mean)
        return (x - mean[..., None]) / (m2 / x.shape[-1] + 1e-5).sqrt()[..., None] * s.gain


args = dict(kind="norm", build=lambda c: Welford(c.d_model), forward=lambda m, x: m(x))
undeclared = Subject(**args)
declared = Subject(**args, declares={"norm": "layer", "norm_bias": False})
