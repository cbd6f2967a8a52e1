"""The picture of the dashboard page in the README: python benchmarks/dashboard_picture.py PICTURE.png

Starts a local cluster, fits three jobs on MNIST (built-in digits where SCALELATENT_DATA is not set), kills a
worker in the third, and takes the picture with a headless Chromium while that job continues.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from common import mnist

import scalelatent as sl
from scalelatent import monitor
from scalelatent.data import make_digits

KILLED_AT, TAKEN_AT = 18, 40
ROUNDS = [(0.8, 1), (0.5, 1), (0.2, 1), (0.0, 20)]


def load_browser() -> ModuleType:
    """Return the tests' headless browser."""
    path = Path(__file__).parent.parent / "tests" / "cluster" / "browser.py"
    spec = importlib.util.spec_from_file_location("scalelatent_browser", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data(folder: Path) -> tuple[Any, Any]:
    """Return (training, validation) datasets on disk."""
    if os.environ.get("SCALELATENT_DATA"):
        x, y = mnist()
        pair = sl.Dataset.from_arrays(x[:50000], y[:50000]), sl.Dataset.from_arrays(x[50000:], y[50000:])
        return tuple(ds.save(folder / f"part{i}.zarr", shard_rows=5000) for i, ds in enumerate(pair))
    return tuple(make_digits(folder / f"part{i}.zarr", n, seed=i) for i, n in enumerate((50000, 10000)))


class Watch(sl.Callback):
    """Tells when some of the passes are reached."""

    def __init__(self) -> None:
        self.reached = {n: threading.Event() for n in (KILLED_AT, TAKEN_AT)}

    def on_pass_end(self, record: dict[str, Any]) -> None:
        """Note the pass."""
        if record["pass"] in self.reached:
            self.reached[record["pass"]].set()


class Broken(sl.Callback):
    """A job that fails, as some do."""

    def on_pass_end(self, record: dict[str, Any]) -> None:
        """Fail."""
        if record["pass"] == 9:
            raise OSError(
                "no space left on /runs (0 MiB free); make room, then continue with: scalelatent resume"
            )


def fit(client: Any, parts: Any, folder: Path, job: str, *callbacks: Any, **options: Any) -> None:
    """Fit one job that reports to the scheduler."""
    run = folder / "runs" / job.rsplit("-", 1)[0]
    options = {"nu_schedule": None} | options
    with monitor.ClusterLog(client, str(run), job=job, model="capsule", name=run.name) as log:
        model = sl.CapsuleRegression(random_state=0, **options)
        model.fit(parts[0], validation=parts[1], client=client, run_dir=run, callbacks=[log, *callbacks])
        log.state("running", report=model.report(run))


def main() -> None:
    """Fit and take the picture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("picture", type=Path)
    arguments.add_argument("--workers", type=int, default=3)
    arguments.add_argument("--height", type=int, default=1080)
    a = arguments.parse_args()
    browser = load_browser()
    with (
        tempfile.TemporaryDirectory(prefix="scalelatent-picture-") as place,
        sl.cluster("local", workers=a.workers, memory_limit="2GB") as client,
        browser.browser() as page,
    ):
        folder = Path(place)
        parts = data(folder)
        print(
            monitor.install(client) or f"{client.dashboard_link.removesuffix('status')}scalelatent",
            flush=True,
        )
        fit(client, parts, folder, "mnist-d4-7c21", capsule_dim=4, max_iter=25)
        try:
            fit(client, parts, folder, "mnist-d16-09fa", Broken(), capsule_dim=16, max_iter=200)
        except OSError as error:
            print(f"as wanted: {error}", flush=True)
        watch = Watch()
        options: dict[str, Any] = {"capsule_dim": 8, "max_iter": 120, "nu_schedule": ROUNDS}
        thread = threading.Thread(
            target=fit, args=(client, parts, folder, "mnist-d8-51be", watch), kwargs=options, daemon=True
        )
        thread.start()
        watch.reached[KILLED_AT].wait(300)
        os.kill(sorted(client.run(os.getpid).values())[1], signal.SIGKILL)
        watch.reached[TAKEN_AT].wait(300)
        page.open(client.dashboard_link.replace("status", "scalelatent"), width=1280, height=a.height)
        page.wait("document.querySelectorAll('path.line').length")
        time.sleep(2.0)
        page.screenshot(a.picture)
        print(f"{a.picture}: {a.picture.stat().st_size / 1e3:.0f} kB, console: {page.errors or 'no errors'}")
        thread.join(300)


if __name__ == "__main__":
    main()
