"""The judge of one subject: prepares it once, then judges it property by property."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from veriformer.properties.anatomy.describing import Part
from veriformer.properties.bench.guards import SubjectError, SubjectTimeoutError, last_frames, whose_fault
from veriformer.properties.bench.isolation import is_lost, isolated
from veriformer.properties.bench.measured import takes_padding_alone
from veriformer.properties.bench.pool import LARGE, callable_subject, parameters_of
from veriformer.properties.bench.profiles import Settings
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.counterexamples.record import names_another_line, says_what_is_wrong, with_cause
from veriformer.properties.diagnosis.repairs.candidates import Failure
from veriformer.properties.diagnosis.repairs.search import repairs_of
from veriformer.properties.engine.property import Property
from veriformer.properties.engine.searching.planning import Plan, plan_of
from veriformer.properties.judging import outcomes
from veriformer.properties.judging.preflight import Preflight, lengths_are_equal, preflight
from veriformer.properties.judging.questions import MOST_QUESTIONS, SILENCING, answered_by, suggested, with_questions
from veriformer.properties.judging.walked import never_walked
from veriformer.properties.power.faults import power
from veriformer.properties.probes.findings import Finding
from veriformer.properties.probes.probe import Seen, identify, probe, taken_apart
from veriformer.properties.results.records import FAIL, NOT_APPLICABLE, OPEN, PASS, Result
from veriformer.properties.subject.asking import LENIENT, facts_asked_for
from veriformer.properties.subject.raised import told
from veriformer.properties.subject.subject import Subject


class Judge:
    """Judges one subject, property by property, in an order that the caller chooses."""

    def __init__(
        self, subject: Subject, settings: Settings, *, is_brief: bool = False, twin: Judge | None = None
    ) -> None:
        """Prepare to judge.

        Args:
            subject: nothing of it is called before the first property is judged.
            settings: of the run.
            is_brief: judge on the declared facts alone, and leave a failing case as it was found.
            twin: judge of a subject that differs in its declarations alone, under the same settings: its models, and
                what was measured on them, serve this one too.
        """
        self.subject = subject
        self.settings = settings
        self.is_brief = is_brief
        self._twin = twin
        self._bench: Workbench | None = None
        self._preflight: Preflight | None = None
        self._narrowed: tuple[str, ...] = ()
        self._seen = Seen()
        self._verified: set[str] = set()
        self._suggested: dict[str, Any] = {}
        self._outcomes: dict[str, str] = {}

    def judge(self, prop: Property) -> Result:
        """Return the outcome of one property. Never raises for anything the subject does; Ctrl-C passes through."""
        started = perf_counter()
        if left := self._of_another_kind(prop):  # before anything is put aside for calls of the subject
            self._outcomes[prop.id] = left.outcome
            return left
        with isolated(self.subject.module):
            result = self._judge(prop) if not self.device_is_lost else outcomes.device_lost(prop)
            if self.device_is_lost and result.outcome != NOT_APPLICABLE:
                result = outcomes.device_lost(prop, result.reason)
        result.seconds = perf_counter() - started
        self._outcomes[prop.id] = result.outcome
        return result

    def plan(self, properties: Sequence[Property]) -> Plan | None:
        """Return what is planned for a large instance, after its cost was measured; None for any other subject."""
        if parameters_of(self.subject.module) < LARGE:
            return None
        with isolated(self.subject.module):
            try:
                self._open()
                assert self._bench is not None
                return plan_of(self._bench, properties)
            except (SubjectError, SubjectTimeoutError, ValueError):  # properties show what it raises
                return None

    def prove_power(self, properties: Sequence[Property]) -> dict[str, Any] | None:
        """Put faults into the subject and return how many the properties of this run notice; see `faults.power`."""
        with isolated(self.subject.module):
            ready = self._prepare()
            if self._bench is None or ready.error or ready.broken:
                return None
            try:
                return power(self._bench, properties)
            except (SubjectError, ValueError):  # at sizes that no property drew; properties show what it raises
                return None
            except RuntimeError:
                if self.device_is_lost:  # by a fault that made an index of what was none
                    return None
                raise

    def never_walked(self, walked: Iterable[str]) -> dict[str, str]:
        """Return the forms of path that are not among those walked, each with the reason; see `walked`."""
        if self._bench is None or self._preflight is None or self._preflight.error:
            return {}
        return never_walked(self._bench.subject, walked)

    def identify(self) -> tuple[list[Finding], str]:
        """Return what can be seen of the subject, declared or not; and why nothing can, or an empty sentence."""
        with isolated(self.subject.module):
            ready = self._prepare()
            if self._bench is None or ready.error:
                return [], ready.error or "it cannot be built"
            return identify(self._bench), ""

    def anatomy(self) -> list[Part]:
        """Return the parts inside the subject that are recognised; none where it cannot be built, or has none."""
        with isolated(self.subject.module):
            ready = self._prepare()
            return [] if self._bench is None or ready.error else taken_apart(self._bench)

    @property
    def device_is_lost(self) -> bool:
        """Whether an assertion failed on the GPU: what this process judges there from now on fails for that alone."""
        return is_lost(torch.device(self.settings.device))

    @property
    def resolved(self) -> Subject:
        """The subject with the facts that were found out; as it was given until the first property is judged."""
        return self._bench.subject if self._bench else self.subject

    @property
    def known(self) -> dict[str, str]:
        """Outcomes so far, by id."""
        return dict(self._outcomes)

    def learn(self, prop_id: str, outcome: str) -> None:
        """Take over an outcome that was found elsewhere (another process), for what requires it."""
        self._outcomes[prop_id] = outcome

    def replay(self, prop: Property, choices: dict[str, Any]) -> Result:
        """Judge one recorded case again."""
        with isolated(self.subject.module):
            ready = self._prepare()
            if self._bench is None or ready.error:
                return outcomes.not_ready(prop, ready)
            result = with_questions(outcomes.replayed(prop, self._bench, choices), prop, self._seen.facts, {})
        self.explain([result], [prop])
        return result

    @property
    def probed(self) -> list[str]:
        """What was found out rather than declared, one sentence each; before the first property only by its maker."""
        return [*self.subject.notes, *self._narrowed, *self._seen.notes]

    @property
    def verified(self) -> set[str]:
        """Facts that a property of those judged so far could have told from false ones."""
        return self._verified

    def applies(self, prop: Property) -> bool:
        """Whether a property is judged on this subject, as far as can be told before it is."""
        with isolated(self.subject.module):
            return self._left(prop) is None

    def _of_another_kind(self, prop: Property) -> Result | None:
        if self.subject.kind in prop.kinds:
            return None
        return outcomes.does_not_apply(prop, prop.why_not(self.subject) or "")

    def _left(self, prop: Property) -> Result | None:
        """Return the result of a property that is not judged, since it does not apply; None where it is."""
        if left := self._of_another_kind(prop):
            return left
        if prop.costly and self.settings.profile != "thorough" and prop.id not in self.settings.named:
            return outcomes.costly(prop)
        try:
            self._prepare()
        except SubjectTimeoutError as problem:
            self._preflight = Preflight(error=str(problem), timed_out=True)
        reason = prop.why_not(self._bench.subject if self._bench else self.subject)
        return outcomes.does_not_apply(prop, reason) if reason else None

    def _judge(self, prop: Property) -> Result:
        if left := self._left(prop):
            return left
        ready = self._prepare()
        if ready.error:
            return outcomes.not_ready(prop, ready)
        blocker = self._blocker(prop, ready)
        if blocker:
            return outcomes.blocked(prop, blocker)
        assert self._bench is not None
        with facts_asked_for() as asked:
            result = outcomes.searched(prop, self._bench, is_brief=self.is_brief)
        if result.outcome in (PASS, FAIL):
            self._verified |= (set(prop.rests_on) | (asked - LENIENT)) - set(prop.leaves_open)
        if self.is_brief:
            return result
        return self._weighed(prop, with_questions(result, prop, self._seen.facts, self._seen.questions))

    def _weighed(self, prop: Property, result: Result) -> Result:
        """Turn a failure into a question, if a fact that it or another one suggests takes it back."""
        self._suggested |= {k: v for k, v in suggested(result).items() if self.subject.fact(k) is None}
        return self.reconsider(prop, result, self._suggested) if result.outcome == FAIL else result

    def reconsider_all(self, results: Sequence[Result], properties: Sequence[Property]) -> list[Result]:
        """Weigh the failures again, now that all that they suggest is known; returns those that became questions."""
        known = {p.id: p for p in properties}
        suggestions: dict[str, Any] = {}
        for result in results:
            suggestions |= {k: v for k, v in suggested(result).items() if self.subject.fact(k) is None}
        failures = [r for r in results if r.outcome == FAIL and r.id in known]
        if not suggestions:
            return []
        with isolated(self.subject.module):
            if self._prepare().error or self._bench is None:
                return []
            turned = [r for r in failures if self.reconsider(known[r.id], r, suggestions).outcome != FAIL]
            asked = [r for r in results if r.outcome == OPEN and r.id in known]
            return turned + [r for r in asked if self._asked_already(known[r.id], r, asked)]

    def _asked_already(self, prop: Property, result: Result, asked: Sequence[Result]) -> bool:
        """Make one question of two, where the answer to another one settles this one and more than two are asked."""
        questions = {r.declare for r in asked}
        if len(questions) <= MOST_QUESTIONS:
            return False
        own = suggested(result)
        others = {k: v for r in asked if r.declare != result.declare for k, v in suggested(r).items() if k not in own}
        for fact, value in others.items():
            if self._judged_with(prop, {fact: value}).outcome in (PASS, NOT_APPLICABLE):
                answered_by(result, **{fact: value})
                return True
        return False

    def explain(self, results: Sequence[Result], properties: Sequence[Property]) -> list[Result]:
        """Let the causes of failures begin with the one change of code that mends them; return those that one does.

        Of failures whose cause says what is wrong nothing is changed: what was measured is believed before what mends.
        """
        known = {p.id: p for p in properties}
        failures = [r for r in results if r.outcome in (FAIL, OPEN) and r.id in known and r.counterexample]
        failures.sort(key=lambda r: r.outcome != FAIL)
        with isolated(self.subject.module):
            silent = [r for r in failures if r.counterexample and not says_what_is_wrong(r.counterexample.cause)]
            if not any(r.outcome == FAIL for r in silent) or self._prepare().error or self.device_is_lost:
                return []
            assert self._bench is not None
            told = repairs_of(self._bench, [
                Failure(known[r.id], r.counterexample.choices, r.outcome != FAIL) for r in failures if r.counterexample
            ])  # fmt: skip
            proven_elsewhere = {
                told[r.id] for r in failures
                if r.id in told and r.counterexample and names_another_line(r.counterexample.cause, told[r.id])
            }  # fmt: skip
            changed = [r for r in silent if r.id in told and told[r.id] not in proven_elsewhere]
            for result in changed:
                assert result.counterexample is not None
                with_cause(known[result.id], self._bench, result.counterexample, told[result.id])
        return changed

    def reconsider(self, prop: Property, result: Result, suggestions: Mapping[str, Any]) -> Result:
        """Return a failure as a question, if it does not occur with one of the facts that are suggested."""
        own = suggested(result)
        for fact, value in suggestions.items():
            if self.subject.fact(fact) is not None:
                continue
            again = self._judged_with(prop, {fact: value})
            silenced = again.outcome == NOT_APPLICABLE and (fact in own or fact not in SILENCING)
            if again.outcome == PASS or silenced:
                return answered_by(result, **{fact: value})
            more = {k: v for k, v in suggested(again).items() if k != fact and self.subject.fact(k) is None}
            if again.outcome == FAIL and any(
                self._judged_with(prop, {fact: value, k: v}).outcome == PASS for k, v in more.items()
            ):
                return answered_by(result, **{fact: value})  # the other is asked for once this one is answered
        others = {k: v for k, v in suggestions.items() if k not in SILENCING}
        for together in (own, others):
            unknown = {k: v for k, v in together.items() if self.subject.fact(k) is None}
            if len(unknown) > 1 and self._judged_with(prop, unknown).outcome == PASS:
                return answered_by(result, **unknown)
        return result

    def _judged_with(self, prop: Property, facts: Mapping[str, Any]) -> Result:
        assert self._bench is not None
        return Judge(self._bench.subject.with_facts(**facts), self.settings, is_brief=True, twin=self).judge(prop)

    def _prepare(self) -> Preflight:
        """Build and call the subject once, find out what it did not declare; what comes of it is kept."""
        if self._preflight is None:
            try:
                self._open()
                assert self._bench is not None
                self._preflight = preflight(self._bench)
                if not (self._preflight.error or self._preflight.broken or self.is_brief):
                    self._seen = probe(self._bench)
                    guessed = {k: v for k, v in self.subject.guesses.items() if self.subject.fact(k) is None}
                    self._seen.facts.update({k: v for k, v in guessed.items() if k not in self._seen.facts})
                    self._bench.subject = self._bench.subject.with_facts(**self._seen.facts)
            except SubjectError as problem:
                self._preflight = Preflight(error=str(problem))
            except Exception as problem:  # a module that was never initialised breaks wherever it is looked at
                fault = whose_fault(problem)
                if isinstance(problem, ValueError) and not last_frames(problem):  # of ours, in words for the user
                    self._preflight = Preflight(error=str(problem))
                    return self._preflight
                where = f" ({fault})" if fault else ""
                self._preflight = Preflight(error=f"looking at the subject raised {told(problem)}{where}")
        return self._preflight

    def _open(self) -> None:
        if self._bench is None:
            self._bench = self._workbench()
            self._bench.subject = callable_subject(self.subject, self._bench.pool)
            if takes_padding_alone(self._bench):
                self._bench.subject = replace(self._bench.subject, mask_forms=("padding",))
            if note := lengths_are_equal(self._bench):
                self._narrowed = (note,)
                self._bench.subject = self._bench.subject.with_facts(equal_lengths=True)

    def _workbench(self) -> Workbench:
        theirs = self._twin._bench if self._twin else None
        bench = Workbench(self.subject, self.settings, theirs.pool if theirs else None)
        if theirs is not None:
            bench.measured = theirs.measured
        return bench

    def _blocker(self, prop: Property, ready: Preflight) -> str | None:
        if prop.id in ready.broken:
            return None
        if ready.broken:
            return ready.broken[0]
        in_the_way = outcomes.STANDS_IN_THE_WAY
        return next((i for i in prop.requires if self._outcomes.get(i) in in_the_way), None)
