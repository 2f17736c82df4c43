# expect only PASS
import warnings

from veriformer.properties import Subject

warnings.simplefilter("error")
mine = Subject(kind="layer", forward=lambda m, x: warnings.simplefilter("error") or x * 2, declares={"causal": True})
