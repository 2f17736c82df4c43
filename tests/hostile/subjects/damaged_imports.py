# expect only PASS
import sys

from veriformer.properties import Subject

sys.path.clear()
sys.meta_path.clear()
sys.path_hooks.clear()
for name in [n for n in sys.modules if n.startswith(("veriformer", "hypothesis", "scipy", "numpy", "json"))]:
    del sys.modules[name]
mine = Subject(kind="layer", forward=lambda m, x: x * 2, declares={"causal": True})
