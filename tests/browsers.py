"""A Chromium without a window, for tests of pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def open_chromium() -> Iterator[Any]:
    """A driver of an installed browser, or a skipped test; nothing is downloaded to have one."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    binary = next(filter(None, map(shutil.which, names)), None)
    service = shutil.which("chromedriver")
    if binary is None or service is None:
        pytest.skip("no Chromium with chromedriver on the path: pages are not tried in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # a container has neither the rights for a sandbox nor much shared memory
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    found.set_script_timeout(60)
    try:
        yield found
    finally:
        found.quit()


def requests_of(driver: Any) -> list[str]:
    """Addresses that were asked for since the log was read last, without those that a page's policy stopped."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    wanted = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    failed = [e["params"] for e in events if e["method"] == "Network.loadingFailed"]
    stopped = {f["requestId"] for f in failed if f.get("blockedReason") == "csp"}
    return [w["request"]["url"] for w in wanted if w["requestId"] not in stopped]
