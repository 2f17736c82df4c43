# expect TIMEOUT: one call of the subject took longer than
import time

from veriformer.properties import Subject

mine = Subject(
    kind="layer", forward=lambda m, x: time.sleep(3600) if x.shape[1] == 3 else x * 2, declares={"causal": True}
)
