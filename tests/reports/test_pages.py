"""The pages in a real browser without a network: they render, filter and sort, and their console stays silent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from broken_models import LEAKY
from veriformer.properties import check
from veriformer.reports.compliance import compliance, write_compliance
from veriformer.reports.formats import write_all

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with chromedriver here")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,900",
        "--proxy-server=127.0.0.1:9",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = check(LEAKY, profile="quick", only=["causality", "parameters"]).to_json()
    found = tmp_path_factory.mktemp("pages")
    write_all(record, found)
    write_compliance(compliance(record), found)
    return found


def rows(browser: webdriver.Chrome) -> list[Any]:
    return [row for row in browser.find_elements(By.CSS_SELECTOR, "[data-outcome]") if row.is_displayed()]


def test_the_report_filters_and_shows_the_case(browser: webdriver.Chrome, folder: Path) -> None:
    browser.get((folder / "report.html").as_uri())
    everything = len(rows(browser))
    Select(browser.find_element(By.ID, "outcome")).select_by_visible_text("fail")
    failing = rows(browser)
    assert 0 < len(failing) < everything
    assert browser.find_element(By.ID, "count").text == f"{len(failing)} shown"
    browser.find_element(By.ID, "words").send_keys("no-future-influence")
    (row,) = rows(browser)
    row.find_element(By.TAG_NAME, "summary").click()
    assert "the mask's diagonal is off by one" in row.text
    assert row.find_elements(By.CSS_SELECTOR, ".map .illegal")
    assert browser.get_log("browser") == []


def test_the_compliance_table_sorts(browser: webdriver.Chrome, folder: Path) -> None:
    browser.get((folder / "compliance.html").as_uri())
    assert len(rows(browser)) == 1
    heads = browser.find_elements(By.CSS_SELECTOR, "th[data-sort]")
    failures = next(h for h in heads if h.text == "property")
    column = [h.text for h in failures.find_elements(By.XPATH, "../th")].index("property")

    def names() -> list[str]:
        table = failures.find_element(By.XPATH, "ancestor::table")
        return [
            row.find_elements(By.TAG_NAME, "td")[column].text
            for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
        ]

    failures.click()
    upwards = names()
    assert upwards == sorted(upwards)
    failures.click()
    assert names() == upwards[::-1]
    assert browser.get_log("browser") == []


def test_the_pages_load_nothing_from_anywhere(folder: Path) -> None:
    for page in folder.glob("*.html"):
        text = page.read_text()
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "src=" not in text
