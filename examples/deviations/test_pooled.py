from pathlib import Path

from pooled import pooled

from veriformer.properties import parametrize

test_pooled = parametrize(pooled, profile="quick", deviations=Path(__file__).with_name("deviations.toml"))
