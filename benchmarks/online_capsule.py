"""Measure the error of capsules against the rows read, on infinite digits (multiclass, d = 4).

    python benchmarks/online_capsule.py FOLDER

The fits are batch EM with the schedule of Saul (2021), which ends by the validation error, and stepwise EM.
(The stored results also have two algorithms that only earlier versions of this package had.) The dataset is
written to FOLDER; its rows are random deformations of MNIST rows 0:50000. The validation rows are MNIST rows
50000:60000. The figure shows the validation error during the fit; a label has the final test error.

`--only stepwise --partial FILE` runs one fit and adds it to FILE. Without --only, the command runs the fits
that FILE lacks, and writes JSON and PNG. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import infinite_digits, parser, write

import scalelatent as sl
from scalelatent.report.style import COLORS, INK, new_figure, style_axes

FIT_TITLES = {
    "em": "batch EM",
    "stepwise": "stepwise EM",
}
# Goal: the test error of stepwise EM exceeds that of batch EM by at most this number of percentage points,
# and stepwise EM reads at most this share of the rows that batch EM reads.
TARGET_POINTS, TARGET_SHARE = 0.3, 0.1


def run_fit(name: str, a: Any) -> dict[str, Any]:
    """Run one fit; return errors, seconds, and the curve: lists [rows read, error, best error so far]."""
    train, held, test = infinite_digits(a.folder, a.rows, a.seed)
    steps = -(-a.rows // 1024)
    model = sl.CapsuleRegression(
        architecture="multiclass",
        capsule_dim=a.dim,
        algorithm=name,
        fit_intercept=False,
        ridge=0,
        max_iter=a.passes,
        n_epochs=a.epochs,
        random_state=a.seed,
        n_jobs=a.jobs,
    )
    begin = time.perf_counter()
    # Stepwise EM computes the validation error ten times per epoch, for the curve.
    often = {"validate_steps": max(steps // 10, 1)} if name == "stepwise" else {}
    model.fit(train, validation=held, engine=often)
    seconds = time.perf_counter() - begin
    best = np.inf
    curve = []
    for i, r in enumerate(model.history_):
        seen = r.get("rows_seen", (i + 1) * a.rows)
        best = min(best, r["validation_error"])
        curve.append([int(seen), round(r["validation_error"], 4), round(best, 4)])
    record = {
        "test_error": round(1 - model.score(test), 4),
        "validation_error": round(float(model.best_validation_error_), 4),
        "passes": model.n_iter_,
        "rows_read": int(curve[-1][0]),
        "seconds": round(seconds, 1),
        "fit_seconds": round(sum(r["seconds"] for r in model.history_), 1),
        "curve": curve,
    }
    print(name, {k: v for k, v in record.items() if k != "curve"}, flush=True)
    return record


def compare_with_batch(fits: dict[str, Any]) -> dict[str, Any]:
    """Return results of each fit relative to batch EM, and whether stepwise EM reaches the goal.

    The results are the difference of test errors in percentage points, the rows read as a share of those of
    batch EM, and the same share until the validation error is within 0.3 points of that of batch EM.
    """
    em, out = fits["em"], {}
    for name, fit in fits.items():
        wanted = em["validation_error"] + TARGET_POINTS / 100
        first = next((rows for rows, _, best in fit["curve"] if best <= wanted + 1e-9), None)
        out[name] = {
            "test_points_above_em": round(100 * (fit["test_error"] - em["test_error"]), 2),
            "share_of_em_rows": round(fit["rows_read"] / em["rows_read"], 4),
            "share_until_within_0.3_validation": first and round(first / em["rows_read"], 4),
        }
    stepwise = out["stepwise"]
    out["target_met"] = (
        stepwise["test_points_above_em"] <= TARGET_POINTS and stepwise["share_of_em_rows"] <= TARGET_SHARE
    )
    return out


def draw_picture(fits: dict[str, Any], rows: int, path: Path) -> None:
    """Draw the best validation error so far against the number of rows read."""
    figure = new_figure(6.4, 4.0)
    ax = figure.add_subplot()
    style_axes(ax)
    for (name, fit), colour in zip(fits.items(), (INK, COLORS[0]), strict=True):
        seen, _, best = np.array(fit["curve"]).T
        label = f"{FIT_TITLES[name]}: test {100 * fit['test_error']:.2f} %"
        ax.plot(seen, 100 * best, color=colour, label=label, lw=1.6)
    ax.axhline(100 * fits["em"]["validation_error"] + TARGET_POINTS, color=INK, lw=0.8, ls=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = (4, 5, 6, 8, 10, 20, 40)
    ax.set_yticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel("rows read")
    ax.set_ylabel("best validation error so far, %")
    ax.set_title(f"{rows:,} infinite digits; dotted: batch EM + {TARGET_POINTS} points", fontsize=9)
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    args = parser(__doc__, "online_capsule")
    args.add_argument("folder", type=Path)
    args.add_argument("--rows", type=int, default=1_000_000)
    args.add_argument("--dim", type=int, default=4)
    args.add_argument("--epochs", type=int, default=10, help="passes of the online algorithms")
    args.add_argument("--passes", type=int, default=2000, help="largest number of passes of batch EM")
    args.add_argument("--jobs", type=int, default=None)
    args.add_argument("--only", choices=list(FIT_TITLES), help="run this fit only")
    args.add_argument("--partial", type=Path, help="JSON file of the finished fits")
    a = args.parse_args()
    fits = json.loads(a.partial.read_text()) if a.partial and a.partial.exists() else {}
    for name in [a.only] if a.only else [n for n in FIT_TITLES if n not in fits]:
        fits[name] = run_fit(name, a)
        if a.partial:
            a.partial.write_text(json.dumps(fits))
    if set(fits) < set(FIT_TITLES):
        return
    fits = {name: fits[name] for name in FIT_TITLES}
    results = {
        "rows": a.rows,
        "dim": a.dim,
        "epochs": a.epochs,
        "fits": fits,
        "comparison": compare_with_batch(fits),
    }
    print(json.dumps(results["comparison"], indent=1))
    write(a.out, a.seed, results)
    draw_picture(fits, a.rows, a.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
