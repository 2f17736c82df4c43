"""How many heads does a small classifier need?"""
import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant


class Classifier(nn.Module):
    def __init__(self, d_model=24, num_heads=2, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(10, d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, num_heads, 48, dropout, batch_first=True)
        self.head = nn.Linear(d_model, 2)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)).mean(1))


def twins(seed, step):
    """Is a digit there twice?"""
    g = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(10, (32, 5), generator=g)
    s = tokens.sort(1).values
    return tokens, (s[:, 1:] == s[:, :-1]).any(1).long()


study = Study(
    name="heads",
    build=Classifier,
    tasks=Task(name="twins", data=twins),
    recipe=Recipe(steps=40, learning_rate=3e-3, warm_up=4),
    variants=[
        Variant("2 heads"),
        Variant("1 head", "the second head", {"num_heads": 1}),
        Variant("4 heads", "two more heads", {"num_head": 4}),
    ],
)
