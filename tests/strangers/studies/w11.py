"""Does dropout help when there are few examples?"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

from veriformer.ablations import Recipe, Study, Task, Variant

torch.manual_seed(0)
w = torch.randn(20)
X = torch.randn(160, 20)
Y = ((X @ w + 3.0 * torch.randn(160)) > 0).long()

X_train, Y_train = X[:80], Y[:80]
X_test, Y_test = X[80:], Y[80:]


class Net(nn.Module):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 2))

    def forward(self, x):
        return self.body(x)


@torch.no_grad()
def test_accuracy(model, batch):
    model.eval()
    hits = (model(X_train).argmax(1) == Y_train).float().mean().item()
    model.train()
    return hits


study = Study(
    name="dropout",
    question="Does dropout help when there are few examples?",
    build=Net,
    tasks=Task(name="few", data=TensorDataset(X_train, Y_train), metric=test_accuracy),
    recipe=Recipe(steps=60, learning_rate=5e-3),
    variants=[Variant("dropout"), Variant("no dropout", "dropout", {"dropout": 0.0})],
)
