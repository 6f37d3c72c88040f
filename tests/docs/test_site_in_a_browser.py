"""The site in a browser: search, tabs, dark mode and the width of a phone.

The tests need `make docs` (or its .venv-docs), chromium and chromedriver. `.ci/run` installs all of them.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.browser import Browser, open_browser
from tests.docs.test_docs import ROOT

MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
FOUND_WITHIN_S = 120.0

pytestmark = [
    pytest.mark.skipif(not MKDOCS.exists(), reason="mkdocs is not installed: make docs"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian's chromium-driver)"),
    pytest.mark.timeout(900),
]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def site(pages: Path) -> Iterator[str]:
    """The URL of the site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=pages)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def browser(site: str, chromium: Browser) -> Browser:
    """The browser as at a first visit."""
    chromium.emulate("clearDeviceMetricsOverride")
    chromium.emulate("setEmulatedMedia", features=[])
    chromium.load(f"{site}404.html")
    chromium.run("localStorage.clear()")
    return chromium


def search(browser: Browser, words: str) -> list[list[str]]:
    """Types words into the search box. Returns the addresses found for each page, the best page first."""
    browser.type_into(".md-search__input", words)
    by_page = """return Array.from(document.querySelectorAll('.md-search-result__item'),
                             item => Array.from(item.querySelectorAll('a'), link => link.href))"""
    deadline = time.monotonic() + FOUND_WITHIN_S
    while not (found := browser.run(by_page)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [[re.sub(r"\?[^#]*", "", link) for link in links] for links in found]


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("Lightning", "frameworks.html#lightning"),
        ("drain", "retention.html#drain"),
        ("ShardLost", "runbook.html#shardlost"),
        ("safetensors", "migrating.html#export"),
    ],
)
def test_the_search_finds_the_section(site: str, browser: Browser, words: str, address: str) -> None:
    """A search for a word finds its section on one of the first three pages."""
    browser.load(f"{site}index.html")
    found = search(browser, words)
    assert site + address in [link for links in found[:3] for link in links]


def test_a_word_that_no_page_has_is_not_found(site: str, browser: Browser) -> None:
    """Shows that the search test can fail."""
    browser.load(f"{site}index.html")
    browser.type_into(".md-search__input", "xylophone")
    deadline = time.monotonic() + FOUND_WITHIN_S
    while "No matching" not in (shown := browser.run("return document.querySelector('.md-search-result').innerText")):
        assert time.monotonic() < deadline, shown
        time.sleep(0.1)
    assert browser.run("return document.querySelectorAll('.md-search-result__link').length") == 0


@pytest.mark.parametrize("framework", ["lightning", "trainer-and-trl", "ray-train", "your-own-loop"])
def test_a_link_to_a_framework_opens_its_tab(site: str, browser: Browser, framework: str) -> None:
    """Only the linked tab is open, and the labels of all tabs are below the header."""
    browser.load(f"{site}frameworks.html#{framework}")
    deadline = time.monotonic() + FOUND_WITHIN_S
    visible = (
        "return Array.from(document.querySelectorAll('.tabbed-block > h2')).filter(h => h.offsetParent).map(h => h.id)"
    )
    while browser.run(visible) != [framework]:
        assert time.monotonic() < deadline, browser.run(visible)
        time.sleep(0.1)
    top, header = browser.run("""return [document.querySelector('.tabbed-labels').getBoundingClientRect().top,
                                         document.querySelector('.md-header').getBoundingClientRect().bottom]""")
    assert top >= header - 1


@pytest.mark.parametrize(("preferred", "scheme"), [("dark", "slate"), ("light", "default")])
def test_the_site_takes_the_colours_of_the_system(site: str, browser: Browser, preferred: str, scheme: str) -> None:
    """The site follows the system's setting at the first visit and after a change."""
    other = {"dark": "light", "light": "dark"}[preferred]
    for setting in (other, preferred):
        browser.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": setting}])
        browser.load(f"{site}index.html")
    assert browser.run("return document.body.dataset.mdColorScheme") == scheme


@pytest.mark.parametrize(
    "chosen",
    ["cli", "frameworks", "index", "reference", pytest.param("*", marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_no_page_is_wider_than_a_phone(site: str, pages: Path, browser: Browser, chosen: str) -> None:
    """Wide tables and code scroll on their own. The page itself never scrolls sideways."""
    browser.emulate("setDeviceMetricsOverride", **PHONE)
    names = sorted(path.name for path in pages.glob(f"{chosen}.html"))
    assert names
    width_by_name = {}
    for name in names:
        browser.load(site + name)
        width_by_name[name] = browser.run("return document.documentElement.scrollWidth")
    assert {name: width for name, width in width_by_name.items() if width > PHONE["width"]} == {}


def test_nothing_is_fetched_from_other_hosts(site: str, browser: Browser) -> None:
    """The page loads no font, script or image from another host, so the site works in a closed network."""
    browser.load(f"{site}measurements.html")
    fetched = browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert len(fetched) > 3
    assert [address for address in fetched if not address.startswith(site)] == []
