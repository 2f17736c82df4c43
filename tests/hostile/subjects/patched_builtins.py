# expect ERROR|PASS
import builtins

from veriformer.properties import Subject


def raises(*args, **kwargs):
    raise RuntimeError("not here")


builtins.open = builtins.print = builtins.sorted = raises
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
