"""Synthetic tasks, each with its chance, its best and what it needs; fresh samples every step."""

from veriformer.ablations.tasks import facts, harder, language, masked, order, translation, views
from veriformer.ablations.tasks.task import IGNORED, TASKS, Samples, Task

__all__ = [
    "IGNORED",
    "TASKS",
    "Samples",
    "Task",
    "facts",
    "harder",
    "language",
    "masked",
    "order",
    "translation",
    "views",
]
