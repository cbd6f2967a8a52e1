"""
The same on your own Dask cluster
=================================

This lesson is for readers who have a Dask cluster, or can start one. After it you can fit a model
on the cluster from Python. You can also hand over a job and switch your own machine off.
"""

# %%
# Start a cluster
# ---------------
# Your cluster may come from SSH, SLURM, Kubernetes or Dask Gateway. Here two terminals stand for it: one
# runs the scheduler, the other one two worker processes.

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from distributed import Client

import scalelatent as sl
from scalelatent.data import make_digits

folder = Path(tempfile.mkdtemp())


def start(*arguments):
    with open(folder / f"{arguments[0]}.log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *arguments], cwd=folder, stdout=log, stderr=log
        )


# $ dask scheduler --scheduler-file scheduler.json --host 127.0.0.1 --port 0
options = ("--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0")
scheduler = start("scheduler", "--scheduler-file", "scheduler.json", *options)
# $ dask worker --scheduler-file scheduler.json --nworkers 2 --nthreads 1
workers = start("worker", "--scheduler-file", "scheduler.json", "--nworkers", "2", "--nthreads", "1")

# %%
# Connect and fit
# ---------------
# Workers read the rows themselves. All machines must see the dataset and the run folder under the
# same name: on a shared file system or in an object store. No rows travel through your process.

make_digits(folder / "train.zarr", 50_000, base_rows=(600, 1797))
make_digits(folder / "test.zarr", 300, base_rows=(0, 300))
train, test = sl.open_dataset(folder / "train.zarr"), sl.open_dataset(folder / "test.zarr")

client = Client(scheduler_file=str(folder / "scheduler.json"), timeout=180)
client.wait_for_workers(2, timeout=180)
parameters = {"architecture": "multiclass", "capsule_dim": 8, "algorithm": "em", "max_iter": 15}
model = sl.CapsuleRegression(**parameters, random_state=0)
begin = time.perf_counter()
model.fit(train, client=client, run_dir=folder / "run-1")
print(f"{model.n_iter_} passes on the cluster in {time.perf_counter() - begin:.1f} s")

alone = sl.CapsuleRegression(**parameters, random_state=0).fit(train)
print("identical to a fit without the cluster:", bool((alone.W_ == model.W_).all()))
client.close()

# %%
# Hand over a job
# ---------------
# ``submit`` sends a job file to the cluster and returns. The driver of the job runs on the cluster, so this
# machine may be closed. ``status``, ``logs`` and ``attach`` look at the job, ``cancel`` stops it at a
# checkpoint.

(folder / "job.toml").write_text(f"""
[job]
name = "digits"
seed = 0
out = "{folder}/run-2"

[data]
train = "{folder}/train.zarr"
test = "{folder}/test.zarr"

[model]
kind = "capsule"
architecture = "multiclass"
capsule_dim = 8
algorithm = "em"
max_iter = 15
""")


def scalelatent(*arguments):
    print("$ scalelatent", *arguments)
    command = [sys.executable, "-m", "scalelatent", *arguments]
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout)


scalelatent("submit", "job.toml", "--scheduler-file", "scheduler.json")
scalelatent("attach", "run-2")

# %%
# The result is in the run folder. A pass measures the weights with which it begins, so the first point shows
# the error before any learning. The first weights are worse than guessing, as in the paper.

submitted = sl.load_model(folder / "run-2" / "model.zarr")
print(f"test accuracy {submitted.score(test):.1%}")
print("identical to both fits above:", bool((submitted.W_ == alone.W_).all()))

figure, axes = plt.subplots(figsize=(6, 3))
errors = [100 * record["train_error"] for record in alone.history_]
axes.plot(range(1, len(errors) + 1), errors)
axes.set(xlabel="pass", ylabel="training error, %", ylim=(0, None))
plt.show()

# %%
# A wrong turn
# ------------
# Names of files that only your machine knows are the most frequent mistake. The job is refused before any
# work starts:

text = (folder / "job.toml").read_text().replace(f"{folder}/train.zarr", "/only/here/train.zarr")
(folder / "wrong.toml").write_text(text.replace("run-2", "run-3"))
scalelatent("submit", "wrong.toml", "--scheduler-file", "scheduler.json")

# %%
# Stop
# ----
# Stop the processes that you started. Recipes for SSH, SLURM, Kubernetes, containers and TLS are in
# :doc:`/guide/dask`.

for process in (workers, scheduler):
    process.terminate()
    process.wait(timeout=180)

assert (submitted.W_ == alone.W_).all()
