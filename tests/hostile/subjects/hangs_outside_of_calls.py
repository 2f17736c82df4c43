# expect TIMEOUT: outside of its calls
# expect BLOCKED: given up
import torch

from veriformer.properties import Subject


class Endless(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        while True:
            try:
                while True:
                    pass
            except:  # noqa: E722
                pass


mine = Subject(kind="layer", forward=lambda m, x: (x * 2).as_subclass(Endless))
