# Energies of point clouds: regression, lower is better.
from torch.nn.functional import l1_loss, mse_loss
import torch, torch.nn as nn
from torch.optim import SGD
from veriformer.ablations import Recipe, Study, Task, Variant


def draw(seed, step, clouds=32, points=5):
    g = torch.Generator(); g.manual_seed((seed << 20) ^ (step + 17))
    xyz = torch.rand(clouds, points, 3, generator=g)
    d = torch.cdist(xyz, xyz)
    e = torch.exp(-3 * d).sum((1, 2)) - points
    return xyz, e[:, None] / points


class Sets(nn.Module):
    def __init__(self, act=nn.SiLU, how="mean", d=32):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(7, d), act(), nn.Linear(d, d), act())
        self.rho = nn.Linear(d, 1)
        self.how = how

    def forward(self, x):
        n = x.shape[1]
        pairs = torch.cat([x[:, :, None].expand(-1, -1, n, -1), x[:, None].expand(-1, n, -1, -1),
                           (x[:, :, None] - x[:, None]).pow(2).sum(-1, keepdim=True)], -1)
        h = self.phi(pairs)
        h = h.mean((1, 2)) if self.how == "mean" else h.amax((1, 2))
        return self.rho(h)


@torch.no_grad()
def mean_absolute_error(model, batch):
    x, y = batch
    return l1_loss(model(x), y)


study = Study(
    name="energies-of-clouds",
    build=Sets,
    tasks=Task(name="energies", data=lambda seed, step: draw(seed, step),
               loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
               metric=mean_absolute_error, lower_is_better=True, margin=0.05),
    optimizer=lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    recipe=Recipe(steps=60),
    variants=[Variant("silu, mean"), Variant("relu", config={"act": nn.ReLU}),
              Variant("softplus", config={"act": nn.Softplus}), Variant("max", config={"how": "max"})],
)
