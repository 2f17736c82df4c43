"""Handing tests to the workers of pytest-xdist: whole subjects, whose models are built once then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xdist.scheduler import LoadGroupScheduling


class BySubject(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """`--dist=loadgroup` in which the rows of a subject are a group; pytest 9.2 takes no marks for it any more."""

    def __init__(self, config: Any, log: Any, groups: Mapping[str, str]) -> None:
        """Prepare.

        Args:
            config: of the run.
            log: of pytest-xdist.
            groups: id of every row, and the subject that it is of.
        """
        super().__init__(config, log)
        self._groups = groups

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid) or super()._split_scope(nodeid)
