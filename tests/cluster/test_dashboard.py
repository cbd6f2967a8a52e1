"""The dashboard page shows fits and jobs in a real browser while they run on the cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from scalelatent import Callback, monitor
from scalelatent.monitor import ClusterLog

from .browser import BROWSER_NAMES, BrowserTab, browser, find_chromium

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason=f"a browser: none of {', '.join(BROWSER_NAMES)} is installed"
)

CURVE_JS = "document.querySelector('path.line[data-series=objective]')"
PASS_JS = "+document.querySelector('.facts dd')?.textContent"
JOB_JS = "document.querySelector('#head h2')?.textContent"


class PassGate(Callback):
    """Callback that pauses the fit after the given passes until the test sets their event, at most 60 s."""

    def __init__(self, *passes: int) -> None:
        self.gates = {number: threading.Event() for number in passes}

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] in self.gates:
            self.gates[record["pass"]].wait(60)


@pytest.fixture(scope="module")
def page() -> Iterator[BrowserTab]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def dashboard_url(client: Any) -> str:
    assert monitor.install(client) == ""
    return str(client.dashboard_link).removesuffix("/status")


def test_a_fit_is_watched_in_a_browser(client: Any, fit: Any, page: BrowserTab, dashboard_url: str) -> None:
    page.open(f"{dashboard_url}/status")  # The test opens the page as a user does: from Dask's page.
    page.wait("document.querySelector('.navbar a[href=scalelatent]') !== null")
    seen = len(page.errors)  # Errors so far come from Dask's own page.
    page.js("document.querySelector('.navbar a[href=scalelatent]').click()")
    page.wait("document.querySelector('#live')?.textContent === 'live'")
    assert page.js("location.pathname") == "/scalelatent"

    gate, failed = PassGate(3, 6), []

    def run() -> None:
        try:
            with ClusterLog(
                client, "/runs/browser", job="browser-01", model="capsule", name="watched"
            ) as log:
                fit(client, max_iter=9, nu_schedule=None, callbacks=[log, gate])
        except Exception as error:  # noqa: BLE001  The test checks `failed`.
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        page.wait("[...document.querySelectorAll('#jobs a')].some(a => a.textContent === 'watched')", 60)
        page.js("location.hash = '#job=browser-01'")
        page.wait(f"{JOB_JS} === 'watched' && {PASS_JS} === 3 && {CURVE_JS}?.dataset.points > 1", 60)
        before = page.js(f"{CURVE_JS}.getAttribute('d')")
        assert page.js("document.querySelector('#head .state').textContent") == "running"
        assert page.js("[...document.querySelectorAll('#workers tbody tr')].length") == 2
        gate.gates[3].set()
        page.wait(f"{PASS_JS} === 6 && {CURVE_JS}.dataset.points > 3", 60)
        assert page.js(f"{CURVE_JS}.getAttribute('d')") != before
        gate.gates[6].set()
        page.wait("document.querySelector('#head .state').textContent === 'done'", 60)
    finally:
        for event in gate.gates.values():
            event.set()
        thread.join(60)
    assert failed == []
    page.wait(f"{CURVE_JS}.dataset.points > 6")
    facts = page.js(
        "Object.fromEntries([...document.querySelectorAll('.facts div')]"
        ".map(d => [d.children[0].textContent, d.children[1].textContent]))"
    )
    assert facts["Pass"] == "9"
    assert facts["Validation error"].endswith(" %")
    assert float(facts["Objective"]) < 3
    assert page.errors[seen:] == []
    assert all(
        url.startswith((dashboard_url, "data:", "about:")) for url in page.requests if "scalelatent" in url
    )


def test_text_of_a_message_is_not_html(client: Any, page: BrowserTab, dashboard_url: str) -> None:
    """HTML in the name or the error of a job is shown as text, and does not run."""
    evil = "<img src=x onerror=\"document.title='run'\">"
    send = {"run": evil, "name": evil, "model": evil, "job": "evil", "state": "failed", "error": evil}
    client.log_event("scalelatent", {"kind": "state", **send})
    client.log_event("scalelatent", {"kind": "event", "run": evil, "name": evil, evil: evil})
    page.open(f"{dashboard_url}/scalelatent#job=evil")
    page.wait(f"{JOB_JS}?.startsWith('<img')")
    assert page.js("document.querySelector('#head .error').textContent") == evil
    assert page.js("document.title") != "run"
    assert page.js("document.querySelectorAll('#scalelatent img').length") == 0


def test_the_page_shows_many_jobs_on_a_narrow_screen(
    client: Any, page: BrowserTab, dashboard_url: str
) -> None:
    for number in range(25):
        run = {"run": f"/runs/many-{number}", "job": f"many-{number}", "name": f"many {number}"}
        client.log_event("scalelatent", {"kind": "state", "state": "done", **run})
    page.open("about:blank")
    page.open(f"{dashboard_url}/scalelatent#job=many-3", width=480, height=900)
    page.wait(f"{JOB_JS} === 'many 3'")
    assert page.js("document.querySelectorAll('#jobs tbody tr').length") <= 11
    assert page.js("document.documentElement.scrollWidth") <= 480  # A user scrolls tables, never the page.
    page.js("document.querySelector('#jobs button').click()")
    assert page.wait("document.querySelectorAll('#jobs tbody tr').length", accept=lambda n: n >= 25)
    errors = [error for error in page.errors if "scalelatent" in error]
    assert errors == []


def test_the_page_shows_rounds_and_a_report_in_dark_mode(
    client: Any, page: BrowserTab, dashboard_url: str
) -> None:
    run = {"run": "/runs/rounds"}
    known = {"job": "rounds", "name": "rounds", "report": "/runs/rounds/report/index.html"}
    client.log_event("scalelatent", {"kind": "state", "state": "running", **run, **known})
    client.log_event("scalelatent", {"kind": "event", "name": "fit_started", "max_iter": 40, **run})
    for number in range(1, 21):
        # Pass 7 reports a hundredth of the seconds of the other passes. The first pass after a resume also
        # reports too few seconds.
        cost = {"rows": 1000, "seconds": 0.01 if number == 7 else 1.0}
        found = {"objective": 1 / number, "nu": 0.5 * (number < 11), "round": 1 + (number >= 11)}
        message = {"kind": "pass", "stage": "capsule_estep", "pass": number, **cost, **found, **run}
        client.log_event("scalelatent", message)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        page.open("about:blank")
        page.open(f"{dashboard_url}/scalelatent#job=rounds", width=800, height=900)
        page.wait("document.querySelectorAll('rect.round').length")
        assert page.js("document.documentElement.scrollWidth") == 800
        assert page.js("[...document.querySelectorAll('.scroll')].every(n => n.scrollWidth <= n.clientWidth)")
        is_dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(n => n < 64)"
        assert page.js(is_dark)
        assert page.js("document.querySelector('#head .pass .bar i').style.width") == "50%"
        link = page.js("document.querySelector('#head a.report').getAttribute('href')")
        assert link == "scalelatent/report?job=rounds"
        rate = "document.querySelector('path.line[data-series=rows_per_s]').closest('svg')"
        whole = "document.querySelector('#charts').getBoundingClientRect().width"
        # The chart of rows per second has the whole width of the page.
        assert page.js(f"{rate}.getBoundingClientRect().width / {whole}") > 0.9
        reported = page.js(f"[...{rate}.querySelectorAll('text')].map(t => t.textContent)")
        # The axis ends near the throughput of the other passes, not near that of pass 7.
        assert "1000" in reported
        assert not any(text.endswith("k") for text in reported)
    finally:
        page.call("Emulation.setEmulatedMedia", features=[])
