"""Take pictures of a job on the dashboard, from its submission to its report.

    python benchmarks/dashboard_picture.py [FOLDER]

The script starts a local cluster of two workers, submits a job that fits a capsule model to a million images,
and kills one worker half way. It writes six pictures to FOLDER in the meantime. The browser is that of
`--browser` or of the variable SCALELATENT_BROWSER, or the first Chromium on the search path.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

import scalelatent as sl
from scalelatent import monitor
from scalelatent.data import make_digits

RESULTS = Path(__file__).parent / "results" / "watch"
# Width of a picture in pixels. The documentation shows pictures slightly smaller, with readable text.
WIDTH = 840
# Text of the job file; ``folder`` and ``passes`` are replaced by the values of the run.
JOB_FILE = """
[job]
name = "digits"
seed = 0
out = "{folder}/run"

[data]
train = "{folder}/train.zarr"
validation = "{folder}/validation.zarr"
test = "{folder}/test.zarr"

[model]
kind = "capsule"
capsule_dim = 8
algorithm = "em"
max_iter = {passes}
"""


def load_browser() -> ModuleType:
    """Return the module of the tests that controls a headless browser."""
    path = Path(__file__).parent.parent / "tests" / "cluster" / "browser.py"
    spec = importlib.util.spec_from_file_location("scalelatent_browser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DashboardWatch:
    """Dashboard page in a browser, and the JSON data that the page shows."""

    def __init__(self, page: Any, base: str, folder: Path) -> None:
        self.page, self.base, self.folder = page, base, folder

    def read(self) -> dict[str, Any]:
        """Return the data of the cluster and of the newest job that the dashboard page receives."""
        with urllib.request.urlopen(f"{self.base}.json", timeout=30) as answer:
            found = dict(json.load(answer))
        if found["jobs"]:
            query = f"{self.base}.json?job={found['jobs'][0]['id']}"
            with urllib.request.urlopen(query, timeout=30) as answer:
                found = dict(json.load(answer))
        return found

    def wait(self, condition: Callable[[dict[str, Any], dict[str, Any]], Any], seconds: float = 300) -> None:
        """Wait until ``condition(cluster, job)`` holds for the page's data, or raise TimeoutError."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.read()
            if found["job"] and condition(found["cluster"], found["job"]):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no state for the next picture in {seconds:g} s; last data: {found}")
            time.sleep(0.1)

    def take_picture(self, name: str, last: str, margin: int = 12) -> None:
        """Write `name`.webp, the page down to ``margin`` pixels below the element with selector ``last``."""
        time.sleep(1.5)
        height = self.page.js(f"document.querySelector({last!r}).getBoundingClientRect().bottom") + margin
        self.page.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=round(height),
                       deviceScaleFactor=1.0, mobile=False)  # fmt: skip
        time.sleep(0.2)
        path = self.folder / f"{name}.webp"
        with tempfile.TemporaryDirectory() as place:
            self.page.screenshot(Path(place, "picture.png"))
            with Image.open(Path(place, "picture.png")) as picture:
                # A WebP file has a third of the bytes of a PNG file for text, and a quarter for figures.
                picture.convert("RGB").save(path, lossless=name != "report", quality=90, method=6)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def kill_worker(client: Any) -> None:
    """Kill a worker that does not run the driver of the job, the task that controls the fit."""
    tasks = client.processing()
    pids = client.run(os.getpid)
    candidates = [address for address in pids if not any("scalelatent-job" in key for key in tasks[address])]
    os.kill(pids[candidates[0]], signal.SIGKILL)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    arguments.add_argument("--browser", help="path of a Chromium")
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--passes", type=int, default=60)
    a = arguments.parse_args()
    if a.browser:
        os.environ["SCALELATENT_BROWSER"] = a.browser
    a.folder.mkdir(parents=True, exist_ok=True)
    browser = load_browser()
    with (
        tempfile.TemporaryDirectory(prefix="digits-") as place,
        sl.cluster("local", workers=2, memory_limit="2GB") as client,
        browser.browser() as page,
    ):
        folder = Path(place)
        make_digits(folder / "train.zarr", a.rows, base_rows=(600, 1797))
        make_digits(folder / "validation.zarr", 20_000, base_rows=(300, 600))
        make_digits(folder / "test.zarr", 20_000, base_rows=(0, 300))
        (folder / "job.toml").write_text(JOB_FILE.format(folder=folder, passes=a.passes))
        if refusal := monitor.install(client):
            raise RuntimeError(refusal)
        base = f"{client.dashboard_link.removesuffix('status')}scalelatent"
        page.open(base, width=WIDTH, height=900)
        submit = [sys.executable, "-m", "scalelatent", "submit", "job.toml", "--scheduler"]
        subprocess.run([*submit, client.scheduler.address], cwd=folder, check=True)

        watch = DashboardWatch(page, base, a.folder)
        watch.wait(lambda cluster, job: True)
        watch.take_picture("submitted", "#events")
        watch.wait(lambda cluster, job: (job["pass"] or 0) >= 5)
        watch.take_picture("first_passes", "#workers")
        watch.wait(lambda cluster, job: (job["pass"] or 0) >= a.passes // 2)
        watch.take_picture("half_way", "#workers")
        kill_worker(client)
        watch.wait(lambda cluster, job: len(job["worker_rows"]) == 3)
        watch.take_picture("worker_replaced", "#workers", 150)
        watch.wait(lambda cluster, job: job["ended"] and job["report"])
        watch.take_picture("done", "#workers")
        page.open(f"{base}/report?job={watch.read()['job']['id']}", width=WIDTH, height=900)
        page.wait("document.readyState === 'complete'")
        watch.take_picture("report", "main article")
        print(f"console of the browser: {page.errors or 'no errors'}")


if __name__ == "__main__":
    main()
