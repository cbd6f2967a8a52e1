"""
A killed job resumes
====================

This example is for readers whose jobs run for hours. A fit is killed by the operating system in the middle.
It resumes from its last checkpoint, and its weights are identical to those of a fit that nobody disturbed.
"""

# %%
# A fit in a process of its own
# -----------------------------
# The script below fits a model to a dataset on disk. With the argument ``kill`` the process kills itself
# with SIGKILL in pass 4, like an operating system that runs out of memory.

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import scalelatent as sl
from scalelatent.data import make_digits

folder = Path(tempfile.mkdtemp())
make_digits(folder / "digits.zarr", 20_000)
script = """
import json, os, signal, sys
import scalelatent as sl

class Kill(sl.Callback):
    def on_pass_end(self, record):
        if record["pass"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)

action, run_dir = sys.argv[1:]
model = sl.CapsuleRegression(
    architecture="multiclass", capsule_dim=4, max_iter=30, nu_schedule=None, random_state=0
)
model.fit(
    sl.open_dataset("digits.zarr"),
    run_dir=run_dir,
    engine={"checkpoint_seconds": 0},
    resume=action == "resume",
    callbacks=[Kill()] if action == "kill" else [],
)
model.save(f"{action}.zarr", overwrite=True)
json.dump([record["train_error"] for record in model.history_], open("errors.json", "w"))
"""


def run(*arguments):
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=folder, check=False)
    print(f"fit.py {' '.join(arguments)}: exit status {done.returncode}")


run("undisturbed", "run-1")
run("kill", "run-2")

# %%
# Minus 9 is the status of a process that SIGKILL ended. ``scalelatent status run-2`` shows the run. It is
# updated from time to time, so it may show an earlier pass than the last checkpoint:

command = [sys.executable, "-m", "scalelatent", "status", "run-2"]
print(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout)

# %%
# Resume
# ------

run("resume", "run-2")
undisturbed, resumed = sl.load_model(folder / "undisturbed.zarr"), sl.load_model(folder / "resume.zarr")
print("identical weights:", bool((undisturbed.W_ == resumed.W_).all()))

# %%
# The history has all passes, although two processes computed them.

figure, axes = plt.subplots(figsize=(6, 3))
errors = [100 * error for error in json.loads((folder / "errors.json").read_text())]
axes.plot(range(1, len(errors) + 1), errors, marker=".")
axes.axvline(4, color="#bd1f01", linestyle="--")
axes.text(4.3, max(errors), "killed here", color="#bd1f01", va="top")
axes.set(xlabel="pass", ylabel="training error, %", ylim=(0, None))
plt.show()

assert (undisturbed.W_ == resumed.W_).all()
