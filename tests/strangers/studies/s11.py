"""bfloat16 autocast in the loss, a ViT on 8x8 images, class token against mean; no GradScaler."""
import torch
from torch import nn, autocast
from torch.nn import functional as F

from veriformer.ablations import Recipe, Study, Task, Variant


class ViT(nn.Module):
    def __init__(self, num_classes=4, patch=4, dim=24, norm=nn.LayerNorm, cls_token=True):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, patch, patch)
        n = (8 // patch) ** 2
        self.cls = nn.Parameter(torch.zeros(1, 1, dim)) if cls_token else None
        self.pos = nn.Parameter(torch.randn(1, n + cls_token, dim) * 0.02)
        self.norm1, self.norm2, self.norm = norm(dim), norm(dim), norm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, num_classes)

    def forward(self, img):
        x = self.patch_embed(img).flatten(2).transpose(1, 2)
        if self.cls is not None:
            x = torch.cat([self.cls.to(x.dtype).expand(len(x), -1, -1), x], 1)
        x = x + self.pos
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        w = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.proj(w.to(v.dtype) @ v)
        x = self.norm(x + self.mlp(self.norm2(x)))
        return self.head(x[:, 0] if self.cls is not None else x.mean(1))


def quadrants(seed, step):
    """Which quadrant is brightest?"""
    gen = torch.Generator().manual_seed(31 * (seed + 1) + 100003 * (step + 1))
    x = torch.randn(32, 1, 8, 8, generator=gen) * 0.4
    y = torch.randint(4, (32,), generator=gen)
    for i, c in enumerate(y.tolist()):
        r, s = divmod(c, 2)
        x[i, :, 4 * r : 4 * r + 4, 4 * s : 4 * s + 4] += 1.5
    return x, y


def amp_loss(model, batch):
    x, y = batch
    with autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float(), y, label_smoothing=0.05)


def accuracy(model, batch):
    with torch.inference_mode(), autocast("cpu", dtype=torch.bfloat16):
        return (model(batch[0]).argmax(-1) == batch[1]).double().mean().item()


study = Study(
    name="vit-amp",
    question="Class token or mean, LayerNorm or RMSNorm, in bfloat16?",
    build=ViT,
    tasks=Task(name="quadrants", data=quadrants, loss=amp_loss, metric=accuracy),
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.05),
    recipe=Recipe(steps=50),
    variants=[
        Variant("class token"),
        Variant("mean", "the class token", {"cls_token": False}),
        Variant("RMSNorm", "LayerNorm", {"norm": nn.RMSNorm}),
        Variant("small patches", "patches of four", {"patch": 2}),
    ],
)
