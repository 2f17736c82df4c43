"""Sending the canaries: known-broken models that this run must notice, or it is void."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.engine.property import Property
from veriformer.properties.judging.judge import Judge
from veriformer.properties.power.canaries import CANARIES
from veriformer.properties.results.records import FAIL, OPEN


def send(kinds: Iterable[str], properties: Sequence[Property], settings: Settings) -> dict[str, Any]:
    """Send the canaries of these kinds through the engine.

    Args:
        kinds: of the subjects of the run.
        properties: of the run.
        settings: of the run; canaries are judged with its seed, dtypes and device, in profile quick, and without a
            limit of time: a slow machine misses none.

    Returns:
        `{"sent": n, "caught": k, "missed": [sentences]}`; none is sent for kinds of which the run judges nothing.
    """
    right = shipped("reference")
    by_id = {p.id: p for p in properties}
    wanted = set(kinds)
    quick = replace(settings, profile="quick", call_seconds=0, hurries=False)
    sent, missed = 0, []
    for canary in CANARIES:
        prop = next((by_id[i] for i in canary.noticed_by if i in by_id), None)
        if canary.kind not in wanted or prop is None:
            continue
        sent += 1
        result = Judge(canary.broken(right[canary.model]), quick, is_brief=True).judge(prop)
        if result.outcome not in (FAIL, OPEN):
            missed.append(f"{canary.name}: {prop.id} says {result.outcome} {result.reason}".strip())
    return {"sent": sent, "caught": sent - len(missed), "missed": missed}
