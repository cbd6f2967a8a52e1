"""Training of a compressive network in PyTorch: minibatches of (row, output) pairs in a seeded order.

PyTorch computes gradients and nothing else: first weights are Philox streams, the order of rows is the
engine's, checkpoints are the engine's records, and prediction needs numpy alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.parameters import DEVICES
from scalelatent.data import Dataset
from scalelatent.engine.batch_loop import Progress, tell_unreadable, write_checkpoint
from scalelatent.engine.cache import shared_cache
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.feeding import Feed
from scalelatent.engine.order import RowOrder
from scalelatent.engine.reading import Meter, Reader
from scalelatent.errors import RunError
from scalelatent.kernels.streams import stream
from scalelatent.models.mbn.model.compressive import first_weights, unscaled

from .compressive_scales import check_rows, scales

STAGE = "compressive_epochs"
RUN_ROWS, BUFFER_RUNS = 1024, 16
# Rows that an error is taken of at a time, and how many numbers they may be.
EVAL_ROWS, EVAL_NUMBERS = 4096, 2**24


def import_torch() -> Any:
    """PyTorch.

    Raises
    ------
    RunError
        It is not installed: naming the extra.

    Examples
    --------
    >>> import_torch().__name__
    'torch'
    """
    try:
        import torch
    except ImportError as error:
        raise RunError(
            "CompressiveMBN learns by PyTorch, which is not installed here: pip install 'scalelatent[torch]' "
            "(a fitted one predicts without it)"
        ) from error
    return torch


def torch_device(torch: Any, device: str) -> str:
    """``"cuda"`` or ``"cpu"`` for ``device`` "auto", "gpu" or "cpu".

    Raises
    ------
    RunError
        ``device="gpu"`` where PyTorch finds none.
    ValueError
        An unknown name.

    Examples
    --------
    >>> torch_device(None, "cpu")
    'cpu'
    """
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is not one of {', '.join(DEVICES)}")
    if device == "cpu":
        return "cpu"
    found = bool(torch.cuda.is_available())
    if device == "gpu" and not found:
        raise RunError(
            "device='gpu', but PyTorch finds no CUDA device here: install its CUDA build on a machine with a "
            "GPU, or use device='cpu'"
        )
    return "cuda" if found else "cpu"


@contextmanager
def torch_threads(torch: Any, threads: int) -> Iterator[None]:
    """So many threads for PyTorch inside; what was set before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes
    ----------
    hidden : tuple of int
    n_epochs, batch_size : int
    learning_rate : float
        Of Adam at the first step; falls to 0 along half a cosine.
    seed : int
    """

    hidden: tuple[int, ...]
    n_epochs: int
    batch_size: int
    learning_rate: float
    seed: int

    def order(self, n_rows: int) -> RowOrder:
        """The order of rows: runs that are read at once, permuted together by the buffer."""
        run = min(RUN_ROWS, -(-n_rows // BUFFER_RUNS))
        return RowOrder(
            n_rows, self.seed, min(self.batch_size, n_rows), run_rows=run, buffer_runs=BUFFER_RUNS
        )


def _dense(rows: Any) -> np.ndarray:
    return rows if isinstance(rows, np.ndarray) else rows.toarray()


class Trainer:
    """Weights, Adam's moments and the scales, where PyTorch computes."""

    def __init__(self, training: Training, x: Dataset, z: Dataset, device: str) -> None:
        self.torch = import_torch()
        self.device, self.training = torch_device(self.torch, device), training
        self.of_rows, self.of_output = scales(x, z)
        sizes = [x.n_features, *training.hidden, z.n_features]
        streams = [stream(training.seed, "compressive-weights", 0, i) for i in range(len(sizes) - 1)]
        first = first_weights(sizes, streams)
        biases = [np.zeros(size, np.float32) for size in sizes[1:]]
        self.parameters = [self._parameter(a) for pair in zip(first, biases, strict=True) for a in pair]
        self.optimizer = self.torch.optim.Adam(self.parameters, lr=training.learning_rate)
        self.mean = self._to_device(self.of_output[0].astype(np.float32))

    def _parameter(self, a: np.ndarray) -> Any:
        return self._to_device(a).requires_grad_(True)

    def _to_device(self, a: np.ndarray) -> Any:
        # Bytes travel as bytes; what PyTorch does not know (uint16) travels as float32.
        a = np.array(a) if a.dtype == np.uint8 else np.array(a, dtype=np.float32)
        return self.torch.from_numpy(a).to(self.device)

    def outputs(self, x: np.ndarray) -> Any:
        """Scaled outputs of rows."""
        shift, scale = self.of_rows
        h = (self._to_device(x).to(self.torch.float32) - shift) / scale
        last = len(self.parameters) - 2
        for at in range(0, last + 1, 2):
            h = self.torch.addmm(self.parameters[at + 1], h, self.parameters[at])
            if at < last:
                h = self.torch.relu(h)
        return h

    def targets(self, z: np.ndarray) -> Any:
        """Scaled outputs that were given."""
        return (self._to_device(z).to(self.torch.float32) - self.mean) / self.of_output[1]

    def step(self, x: np.ndarray, z: np.ndarray, share: float) -> float:
        """One step of Adam at a share of the whole training; returns the mean squared error before it."""
        rate = 0.5 * self.training.learning_rate * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = ((self.outputs(x) - self.targets(z)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def error(self, x: Dataset, z: Dataset) -> float:
        """Mean squared error over a dataset, in units of the training outputs' variance."""
        total, rows = 0.0, max(1, min(EVAL_ROWS, EVAL_NUMBERS // x.n_features))
        with self.torch.no_grad():
            for a in range(0, len(x), rows):
                b = min(a + rows, len(x))
                off = self.outputs(_dense(x.read_x(a, b))) - self.targets(z.read_x(a, b))
                total += float((off.double() ** 2).sum())
        return total / (len(x) * z.n_features)

    def network(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(weights, biases) for rows and outputs as they are."""
        arrays = [p.detach().cpu().numpy() for p in self.parameters]
        return unscaled(arrays[::2], arrays[1::2], self.of_rows, self.of_output)

    def state(self) -> dict[str, Any]:
        """All that training goes on from."""
        out: dict[str, Any] = {}
        for i, p in enumerate(self.parameters):
            kept = self.optimizer.state[p]
            out[f"p{i}"] = p.detach().cpu().numpy().copy()
            out[f"m{i}"] = kept["exp_avg"].cpu().numpy().copy()
            out[f"v{i}"] = kept["exp_avg_sq"].cpu().numpy().copy()
            out["steps"] = int(kept["step"])
        return out

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        with self.torch.no_grad():
            for i, p in enumerate(self.parameters):
                p.copy_(self._to_device(state[f"p{i}"]))
                self.optimizer.state[p] = {
                    "step": self.torch.tensor(float(state["steps"])),
                    "exp_avg": self._to_device(state[f"m{i}"]),
                    "exp_avg_sq": self._to_device(state[f"v{i}"]),
                }


def train(
    trainer: Trainer,
    x: Dataset,
    z: Dataset,
    held: tuple[Dataset, Dataset] | None,
    callbacks: Callback,
    store: Any,
) -> list[dict[str, Any]]:
    """Train to the end, or until a callback says so; returns a record an epoch.

    Each epoch is a checkpoint where there is a store.

    Raises
    ------
    RunError
        The error grew beyond all bounds.
    DataError
        NaN among the rows.
    """
    training, order = trainer.training, trainer.training.order(len(x))
    history: list[dict[str, Any]] = []
    begin = _resume(trainer, store, history, callbacks)
    total = training.n_epochs * order.n_steps
    feeds = [Feed(Reader(ds, shared_cache(), Meter()), order, [0], training.n_epochs) for ds in (x, z)]
    try:
        for epoch in range(begin, training.n_epochs):
            started, progress, loss = time.perf_counter(), Progress(callbacks, STAGE, epoch + 1), 0.0
            for step in range(order.n_steps):
                (rows,), (outputs,) = (feed.blocks(epoch, step, callbacks.on_wait) for feed in feeds)
                assert rows is not None
                assert outputs is not None
                share = (epoch * order.n_steps + step) / total
                loss += trainer.step(rows.x, outputs.x, share) * order.step_rows(step)
                callbacks.on_wait()
                progress(min((step + 1) * order.batch_rows, len(x)), len(x))
            _check_loss(loss, x, z)
            record = _record(epoch, loss / len(x), time.perf_counter() - started, len(x))
            if held is not None:
                record["validation_error"] = trainer.error(*held)
            history.append(record)
            if store is not None:
                store.append_history(STAGE, record)
                write_checkpoint(
                    store, STAGE, epoch + 1, trainer.state, callbacks, {"pass": epoch + 1}, kept=False
                )
            if callbacks.on_pass_end(record):
                break
    finally:
        for feed in feeds:
            feed.close()
    return history


def _resume(trainer: Trainer, store: Any, history: list[dict[str, Any]], callbacks: Callback) -> int:
    found = None if store is None else store.latest_state(STAGE)
    if found is None:
        return 0
    epoch, state, messages = found
    tell_unreadable(callbacks, messages)
    trainer.restore(state)
    history += store.load_history(STAGE, epoch)
    callbacks.on_event({"event": "resumed", "stage": STAGE, "pass": epoch, "history": list(history)})
    return int(epoch)


def _record(epoch: int, loss: float, seconds: float, rows: int) -> dict[str, Any]:
    return {
        "pass": epoch + 1,
        "stage": STAGE,
        "objective": loss,
        "train_error": None,
        "validation_error": None,
        "seconds": seconds,
        "rows": rows,
    }


def _check_loss(loss: float, x: Dataset, z: Dataset) -> None:
    if math.isfinite(loss):
        return
    check_rows(x, "X")
    check_rows(z, "the output")
    raise RunError(
        "the network's error grew beyond all numbers: lower learning_rate (a tenth of it is a good try)"
    )
