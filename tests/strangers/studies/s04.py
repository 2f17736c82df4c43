"""Ragged sequences, padded in a collate function, read by packed LSTMs and GRUs."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from veriformer.ablations import Recipe, Study, Task, Variant


class Brackets(Dataset):
    """Is a string of brackets ever below zero? 1: '(', 2: ')', 0: padding."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(3)
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(2, 13, (1,), generator=g))
            self.rows.append(torch.randint(1, 3, (k,), generator=g))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        height = torch.where(row == 1, 1, -1).cumsum(0)
        return row, int(height.min() < -1)


def collate(items):
    rows, labels = zip(*items)
    lengths = torch.tensor([len(r) for r in rows])
    return pad_sequence(rows, batch_first=True), lengths, torch.tensor(labels)


class Reader(nn.Module):
    def __init__(self, cell="lstm", hidden=16, both_ways=False):
        super().__init__()
        self.table = nn.Embedding(3, 8, padding_idx=0)
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[cell]
        self.rnn = kind(8, hidden, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(hidden * (1 + both_ways), 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.rnn(packed)
        h = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat(list(h), dim=-1))


loader = DataLoader(Brackets(800), batch_size=20, shuffle=True, collate_fn=collate)

study = Study(
    name="cells",
    question="Which recurrent cell reads brackets best?",
    build=Reader,
    tasks=Task(name="brackets", data=loader),
    recipe=Recipe(steps=60, learning_rate=1e-2),
    variants=[Variant("lstm")]
    + [Variant(c, f"{c} for lstm", {"cell": c}) for c in ("gru", "rnn")]
    + [Variant("both ways", "the backward direction", {"both_ways": True})],
)
