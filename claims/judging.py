"""Evidence from the properties: how many hold of shipped subjects."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=256)
def judged(ids: tuple[str, ...], subjects: tuple[str, ...], profile: str, seed: int) -> tuple[int, int, int]:
    """Return how many results are no pass though they apply, how many properties passed somewhere, on how many cases.

    Args:
        ids: of the properties.
        subjects: targets of shipped subjects, as `reference:encoder-none`.
        profile: "quick", "standard" or "thorough".
        seed: of every random choice.
    """
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.catalogue import select
    from veriformer.properties.judging.run import run
    from veriformer.properties.targets import load

    settings = Settings(profile=profile, seed=seed, named=ids)
    report = run([s for target in subjects for s in load(target)], select(list(ids), [], "all"), settings)
    results = [r for part in report.subjects for r in part.results if r.id in ids and r.outcome != "NOT_APPLICABLE"]
    passed = [r for r in results if r.outcome == "PASS"]
    return len(results) - len(passed), len({r.id for r in passed}), sum(r.examples for r in passed)
