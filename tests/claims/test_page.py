"""The ledger's page in a real browser without a network: it filters, its rows open, it fits a phone, it goes dark."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions
from selenium.webdriver.support.ui import Select, WebDriverWait

from veriformer.reports.claims import page

LEDGER = Path(__file__).parents[2] / "reports" / "gallery" / "claims" / "claims.json"
RECORD: dict[str, Any] = json.loads(LEDGER.read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = RECORD["claims"]
BROWSER, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with chromedriver here")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    written = tmp_path_factory.mktemp("ledger") / "claims.html"
    written.write_text(page(RECORD), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--proxy-server=127.0.0.1:9"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.get(written.as_uri())
    last = (By.ID, f"claim-{ROWS[-1]['number']}")  # a loaded machine lays rows out late
    WebDriverWait(driver, 60).until(expected_conditions.visibility_of_element_located(last))
    yield driver
    driver.quit()


def shown(browser: webdriver.Chrome) -> list[int]:
    script = "return [...document.querySelectorAll('.claim')].filter(e => e.offsetParent).map(e => +e.id.slice(6))"
    return list(browser.execute_script(script))


def choose(browser: webdriver.Chrome, name: str, value: str) -> list[int]:
    """Return what is shown under one filter, and take it off again."""
    select = Select(browser.find_element(By.ID, name))
    select.select_by_value(value)
    found = shown(browser)
    assert browser.find_element(By.ID, "shown").text == f"{len(found)} shown"
    select.select_by_value("")
    return found


def test_rows_are_filtered_by_verdict_notes_topic_and_words(browser: webdriver.Chrome) -> None:
    assert shown(browser) == [row["number"] for row in ROWS]
    for verdict in Counter(row["verdict"] for row in ROWS):
        assert choose(browser, "verdict", verdict) == [r["number"] for r in ROWS if r["verdict"] == verdict]
    for letter in "ABCDE":
        cited = [r["number"] for r in ROWS if any(s["cited_as"][0] == letter for s in r["sources"])]
        assert choose(browser, "notes", letter) == cited
    for topic in {row["topic"] for row in ROWS}:
        assert choose(browser, "topic", topic) == [r["number"] for r in ROWS if r["topic"] == topic]
    words = browser.find_element(By.ID, "words")
    words.send_keys("ALiBi")
    assert 52 in shown(browser)
    assert len(shown(browser)) < 10
    words.clear()
    words.send_keys(" ")  # clear() tells the page of no change
    assert len(shown(browser)) == len(ROWS)


def test_every_row_opens_with_its_numbers_formula_and_command(browser: webdriver.Chrome) -> None:
    browser.execute_script(
        "document.querySelectorAll('.claim details').forEach(d => d.querySelector('summary').click())"
    )
    bodies = browser.execute_script(
        "return [...document.querySelectorAll('.claim')].map(c => [c.querySelector('.body').offsetHeight > 0,"
        " c.querySelectorAll('tbody tr').length, c.querySelectorAll('.formula').length,"
        " c.querySelectorAll('figure svg').length, c.querySelector('.body').textContent])"
    )
    for row, (is_open, findings, formulas, _, text) in zip(ROWS, bodies, strict=True):
        assert is_open
        assert (findings, formulas) == (len(row["findings"]), bool(row["formula"]))
        assert row["command"] in text
    assert sum(figures for *_, figures, _ in bodies) > 3
    assert not browser.get_log("browser")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_a_phone_and_goes_dark(browser: webdriver.Chrome, width: int, scheme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paper, ink = browser.execute_script(
        "const s = getComputedStyle(document.body);"
        "const light = c => c.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 765;"
        "const paper = s.backgroundColor === 'rgba(0, 0, 0, 0)' ? 'rgb(255,255,255)' : s.backgroundColor;"
        "return [light(paper), light(s.color)]"
    )
    assert (paper < 0.2 < 0.7 < ink) if scheme == "dark" else (ink < 0.4 < 0.8 < paper)
