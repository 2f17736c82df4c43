"""The pages in a real browser without a network: they render, filter and sort, and their console stays silent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from broken_models import LEAKY
from veriformer.properties import check
from veriformer.reports.compliance import compliance, write_compliance
from veriformer.reports.formats import write_all
from veriformer.reports.report_page import page

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


def test_what_fails_is_open_with_its_cause_and_picture(browser: webdriver.Chrome, folder: Path) -> None:
    browser.get((folder / "report.html").as_uri())
    assert browser.find_element(By.TAG_NAME, "h1").text == LEAKY.name
    story, *_ = browser.find_elements(By.CSS_SELECTOR, ".story")
    assert "the mask's diagonal is off by one" in story.text
    assert story.find_elements(By.CSS_SELECTOR, ".map .illegal")
    story.find_element(By.LINK_TEXT, "causality.no-future-influence").click()
    place = browser.find_element(By.ID, "p-causality.no-future-influence")
    WebDriverWait(browser, 60).until(lambda _: place.get_property("open"))  # the browser tells of a new place later
    assert "Vaswani et al. 2017" in place.text
    assert browser.get_log("browser") == []


def test_the_results_are_filtered_and_the_filter_stands_in_the_address(browser: webdriver.Chrome, folder: Path) -> None:
    browser.get((folder / "report.html").as_uri())
    everything = len(rows(browser))
    Select(browser.find_element(By.ID, "outcome")).select_by_visible_text("fail")
    failing = rows(browser)
    assert 0 < len(failing) < everything
    assert browser.find_element(By.ID, "count").text == f"{len(failing)} shown"
    browser.find_element(By.ID, "words").send_keys("no-future-influence")
    assert len(rows(browser)) == 1
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    assert len(rows(browser)) == 1
    Select(browser.find_element(By.ID, "outcome")).select_by_visible_text("n.a.")
    browser.find_element(By.ID, "words").clear()
    assert rows(browser), "what does not apply is folded until it is asked for"
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", ["report.html", "compliance.html"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wider_than_its_window_and_dark_is_dark(
    browser: webdriver.Chrome, folder: Path, name: str, width: int
) -> None:
    papers = []
    for mode in ("light", "dark"):
        device = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        feature = {"name": "prefers-color-scheme", "value": mode}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        browser.get((folder / name).as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        papers.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert papers == ["rgb(255, 255, 255)", "rgb(20, 24, 28)"]


def test_a_cell_of_the_compliance_map_opens_its_models(browser: webdriver.Chrome, folder: Path) -> None:
    browser.get((folder / "compliance.html").as_uri())
    assert len(rows(browser)) == 1
    (cell,) = (
        c for c in browser.find_elements(By.CSS_SELECTOR, ".heat button") if "causality" in c.get_attribute("title")
    )
    assert cell.text.startswith("✗")
    cell.click()
    (row,) = rows(browser)
    row.find_element(By.TAG_NAME, "summary").click()
    assert "causality.no-future-influence FAIL: the outputs before position" in row.text
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    assert Select(browser.find_element(By.ID, "family")).first_selected_option.text == "causality"
    browser.find_element(By.ID, "words").send_keys("nothing is called so")
    assert not rows(browser)
    assert browser.get_log("browser") == []


def test_the_pages_load_nothing_from_anywhere(folder: Path) -> None:
    for path in folder.glob("*.html"):
        text = path.read_text()
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "src=" not in text


def test_a_large_picture_scrolls_in_its_own_frame(browser: webdriver.Chrome, folder: Path) -> None:
    record = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for result in record["subjects"][0]["results"]:
        if case := result["counterexample"]:
            case["influence"] = {"magnitude": [[1.0] * 90] * 3, "allowed": [[True] * 90] * 3}
            case["cause"] = "x" * 400
    (folder / "large.html").write_text(page(record), encoding="utf-8")
    device = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
    browser.get((folder / "large.html").as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
