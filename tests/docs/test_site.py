"""The site: every property has its page, every link leads somewhere, and nothing is fetched from elsewhere."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from record_failures import RECORD
from veriformer.cli import index
from veriformer.cli.site import page_of
from veriformer.reports.site.formula import as_html, pieces
from veriformer.reports.site.gallery_page import gallery_page, lead
from veriformer.reports.site.property_page import property_page
from veriformer.reports.site.source_links import for_the_site
from veriformer.reports.site.tolerances import JUDGEMENTS, judgings
from veriformer.tests.mutants import all_faults

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
NAV = re.findall(r"^      - (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
MADE = ("kinds.md", "facts.md", "outcomes.md", "studies.md", "properties/index.md")
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")


def test_every_formula_is_drawn() -> None:
    formulas = [record["formula"] for record in index.properties().values()]
    assert all("".join(piece.text for piece in pieces(formula)) for formula in formulas)
    told = [as_html(formula) for formula in formulas[::12]]
    assert all("<path" in html and "<code" not in html for html in told)
    with pytest.raises(ValueError, match="a bracket is not closed"):
        pieces("sqrt(x")


@pytest.mark.parametrize(
    ("formula", "tex", "words"),
    [
        ("d f(x)_t / d x_s = 0", r"\partial \,f(x)_{t}\,/\,\partial \,x_{s} =\,0", ""),
        ("24 T d^2 + 4 T^2 d", r"24\,T\,d^{2}\,+\,4\,T^{2}\,d", ""),
        ("x'_s = x_s where mask_s", r"x'_{s} =\,x_{s} \mathrm{mask}_{s}", "where"),
        ("|x| <= 6e4 in float16", r"\vert x\vert \leq \,6\cdot 10^{4}", "in float16"),
        ("u in [0, 1], f in train mode", r"u\,\in \,[0,\,1], f", "in train mode"),
        ("rows of the Jacobian sum to 0; sum_i p_i = 1", r"0; \sum _{i}\,p_{i} =\,1", "rows of the Jacobian sum to"),
    ],
)
def test_formulas_as_they_are_typed(formula: str, tex: str, words: str) -> None:
    found = pieces(formula)
    assert " ".join(p.text for p in found if p.is_tex) == tex
    assert " ".join(p.text for p in found if not p.is_tex) == words


def test_the_tolerance_of_every_property_is_read_from_its_check() -> None:
    found = judgings(ROOT / "src" / "veriformer")
    assert set(found) == set(index.properties())
    assert all(judging.uses <= {*JUDGEMENTS, "measured", "derived"} and judging.uses for judging in found.values())
    exact = found["softmax.masked-is-zero"]
    assert "exact" in exact.uses
    derived = found["softmax.accuracy"]
    assert "derived" in derived.uses
    assert derived.bounds["softmax_bound"].derivation.startswith("Bound the error of a softmax")
    assert all("derived" not in judging.uses or judging.expressions for judging in found.values())


def test_recorded_failures_are_of_the_zoo() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    faults, known = all_faults(), index.properties()
    assert set(recorded) <= set(known)
    assert len(recorded) >= len(known) - 1  # one is noticed by what the subject raises, which is no case
    stale = [
        prop
        for prop, failure in recorded.items()
        if prop not in faults[failure["fault"]].killed_by
        or " ".join(known[prop]["statement"].split()) not in (told := " ".join(failure["text"].split()))
        or f"Not so for {failure['fault']}:" not in told
    ]
    assert not stale, f"python tests/record_failures.py {' '.join(stale)}"


def test_a_recorded_failure_is_what_is_seen() -> None:
    from record_failures import recorded
    from veriformer.properties.judging.catalogue import catalogue

    name = "softmax.simplex"
    seen = recorded(catalogue()[name])
    assert seen == json.loads(RECORD.read_text(encoding="utf-8"))[name]


def test_a_page_tells_all_that_is_recorded() -> None:
    record = index.properties()["causality.no-future-influence"]
    faults = index.faults_shown()[record["id"]]
    failure = json.loads(RECORD.read_text(encoding="utf-8"))[record["id"]]
    page = property_page(record, faults, failure, judgings(ROOT / "src" / "veriformer")[record["id"]], ["a.b"])
    assert record["statement"] in page
    assert "<path" in page
    assert all(f"**{fault['id']}**" in page for fault in faults)
    assert "](https://github.com/" in page
    assert "<pre" in page
    assert "[a.b](a.b.md)" in page
    assert "tolerances.md#measured" in page


def _places() -> dict[str, str]:
    """Return every page that the site has, by its place; of those made of records the place alone."""
    pages = {str(p.relative_to(DOCS)): p.read_text(encoding="utf-8") for p in DOCS.rglob("*.md")}
    pages |= dict.fromkeys(MADE, "")
    pages |= {f"properties/{name}.md": "" for name in index.properties()}
    gallery = ROOT / "reports" / "gallery"
    shown = [p for p in gallery.rglob("*") if p.suffix in (".md", ".html", ".png", ".csv")]
    return pages | {f"gallery/{p.relative_to(gallery)}": "" for p in shown}


def _links(text: str) -> Iterator[str]:
    bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from (link for link in LINK.findall(bare) if "://" not in link)


def test_links_of_hand_written_pages_lead_to_pages() -> None:
    pages = _places()
    for place, text in pages.items():
        for link in _links(for_the_site(text)):
            target = link.partition("#")[0]
            where = (DOCS / place).parent / target if target else DOCS / place
            assert str(where.resolve().relative_to(DOCS)) in pages, f"{place}: {link}"


def test_links_of_hand_written_pages_work_in_a_clone_that_has_built_nothing() -> None:
    written = {path: path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    tracked = {ROOT / line for line in _tracked()}
    for path, text in written.items():
        for link in _links(text):
            target, _, section = link.partition("#")
            where = (path.parent / target).resolve() if target else path
            assert where in tracked or any(where in one.parents for one in tracked), f"{path}: {link}"
            if section and where.suffix == ".md":
                assert section in _sections(where.read_text(encoding="utf-8")), f"{path}: {link}"


def _tracked() -> list[str]:
    """Return the files that a clone has; in an unpacked archive, all but what is built."""
    if (ROOT / ".git").exists():
        called = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
        return subprocess.run(called, capture_output=True, text=True, check=True).stdout.splitlines()
    return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if not {"build", ".venv"} & {*p.parts}]


def _sections(text: str) -> set[str]:
    """Return the anchors of a page, as they are where Markdown is shown without attributes, and those that it names."""
    titles = re.findall(r"^#+ (.*?)(?: \{ #([\w-]+) \})?$", text, re.MULTILINE)
    return {anchor or re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title, anchor in titles}


def test_every_page_is_in_the_navigation() -> None:
    written = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert written | set(MADE) == set(NAV)


def test_pages_quote_files_of_the_gallery_that_say_something() -> None:
    found = [name for text in _places().values() for name in re.findall(r"<!-- lead: (\S+) -->", text)]
    assert len(found) > 5
    for name in found:
        words = lead((ROOT / "reports" / "gallery" / name).read_text(encoding="utf-8"))
        assert len(words.split()) > 5, name
        assert not words.startswith("|")


def test_tables_of_the_gallery_lose_their_padding_alone() -> None:
    text = (ROOT / "reports" / "gallery" / "strangers.md").read_text(encoding="utf-8")
    page = gallery_page(text, is_large=False)
    squeezed = re.sub(r"-+", "-", re.sub(r"[ \n]+", "", text))
    assert squeezed in re.sub(r"-+", "-", re.sub(r"[ \n]+", "", page))


def test_explain_names_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    site = importlib.import_module("veriformer.cli.site")
    monkeypatch.setattr(site, "address", lambda: "")
    assert page_of("softmax.axis") == "build/site/properties/softmax.axis.html, in a clone, after `make docs`"
    monkeypatch.setattr(site, "address", lambda: "https://docs.example/veriformer")
    assert page_of("softmax.axis") == "https://docs.example/veriformer/properties/softmax.axis.html"


def test_the_address_is_the_projects_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from email.message import Message

    site = importlib.import_module("veriformer.cli.site")
    site.address.cache_clear()
    told = Message()
    told["Project-URL"] = "Source, https://elsewhere.example"
    told["Project-URL"] = "Documentation, https://docs.example/veriformer/"
    monkeypatch.setattr(site.metadata, "metadata", lambda name: told)
    assert site.address() == "https://docs.example/veriformer"
    site.address.cache_clear()


def test_every_outcome_has_words() -> None:
    from veriformer.properties.results.records import OUTCOMES
    from veriformer.reports.site.word_pages import outcomes_page
    from veriformer.reports.verdicts import MEANINGS, STATUSES

    page = outcomes_page(OUTCOMES, MEANINGS, STATUSES)
    assert all(f"## {outcome} {{ #{outcome.lower()} }}" in page for outcome in OUTCOMES)
    with pytest.raises(KeyError, match="NEW"):
        outcomes_page((*OUTCOMES, "NEW"), MEANINGS, STATUSES)
