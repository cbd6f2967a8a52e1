"""Compressive network: a feed-forward network that learns the output of a bootstrap network with PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.contract.parameters import DEVICES, is_list
from scalelatent.data import Dataset
from scalelatent.data.read.containers import opened
from scalelatent.engine.batch_loop import Progress, report_unreadable, write_checkpoint
from scalelatent.engine.cache import shared_cache
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.feeding import Feed
from scalelatent.engine.grid import space_ranges
from scalelatent.engine.order import RowOrder
from scalelatent.engine.reading import Meter, Reader
from scalelatent.engine.threads import resolve_jobs
from scalelatent.errors import DataError, RunError
from scalelatent.estimators.base import SavedModelState, StreamedEstimator
from scalelatent.estimators.fit_services import FitCall, fit_callbacks, restored_on_failure
from scalelatent.estimators.inputs import check_finite, is_in_memory, rows_and_labels
from scalelatent.estimators.onnx_graph import OnnxGraph
from scalelatent.estimators.session import CallbackList, FitSession, restore_row_ranges
from scalelatent.kernels.arrays import DenseOrCsr
from scalelatent.kernels.streams import stream
from scalelatent.models.mbn.model.compressive import NetworkRows, draw_weights, remove_scales

from .parameters import COMPRESSIVE

if TYPE_CHECKING:
    import torch

# Number of rows that `CompressiveMBN.score` has in memory at a time.
SCORE_ROWS = 2**16
# Name under which a run folder stores the checkpoints of training, one per epoch.
EPOCHS_STAGE = "compressive_epochs"
# Random order of training rows: ranges of at most RUN_ROWS contiguous rows are read in random order, and the
# rows of BUFFER_RUNS ranges are shuffled together in memory.
RUN_ROWS, BUFFER_RUNS = 1024, 16
# The validation error is computed for at most this many rows, and this many values, at a time.
EVAL_ROWS, EVAL_VALUES = 4096, 2**24
# Rows and outputs are scaled by a mean and a deviation from a sample: this many ranges of this many rows.
SAMPLED_RANGES, RANGE_ROWS = 64, 256
# At most this many rows and this many bytes are read at a time to check them for NaN and infinity.
CHECKED_ROWS, CHECKED_BYTES = 1024, 2**24


class CompressiveMBN(StreamedEstimator):
    """Feed-forward network that learns the output of a multilayer bootstrap network (MBN).

    It predicts the output faster than the bootstrap network, which compares each row with all centroids
    (sections 2.4 and 5.6 of the paper).

    Parameters
    ----------
    hidden : sequence of int
        Number of rectified linear units of each hidden layer; the paper uses (2048, 2048).
    n_epochs : int
        Number of passes over the training rows.
    batch_size : int
        Number of rows of a minibatch, for one step of the optimizer.
    learning_rate : float
        Learning rate of Adam at the first step; it falls to 0 along half a cosine.
    random_state : int, Generator, RandomState or None
        Seed of the initial weights and of the order of rows.
    device : {"auto", "cpu", "gpu"}
        "auto" trains on a GPU if PyTorch finds one, and predicts on a GPU if CuPy finds one.
    n_jobs : int or None
        Number of threads. None means the setting of ``joblib.parallel_config``, else all cores.

    Attributes
    ----------
    coefs_ : list of ndarray of float32, shape (inputs, outputs) each
    intercepts_ : list of ndarray of float32, shape (outputs,) each
    n_iter_ : int
        Number of epochs.
    history_ : list of dict
        One record per epoch. ``objective`` is the mean squared error of the training rows during the epoch,
        and ``validation_error`` the error of the validation rows after the epoch. Both errors are divided by
        the variance of the outputs.
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``transform`` estimates the output of the bootstrap network, float32 (n, outputs). ``fit`` needs PyTorch
    (``pip install 'scalelatent[torch]'``); a fitted or loaded model predicts with numpy or CuPy. A fit on the
    same machine with the same number of threads has the same bits.

    References
    ----------
    Zhang, X.-L. (2018). Multilayer bootstrap networks. Neural Networks 103, 29-43.

    Examples
    --------
    >>> import numpy as np, scalelatent as sl
    >>> x = np.random.default_rng(0).normal(size=(500, 4)).astype("float32")
    >>> z = np.column_stack([x[:, 0] * x[:, 1], np.abs(x[:, 2])])
    >>> small = sl.CompressiveMBN(hidden=(64,), n_epochs=3, n_jobs=1, random_state=0)
    >>> small.fit(x, z).transform(x).shape
    (500, 2)
    """

    _kind = "compressive"
    _parameters = COMPRESSIVE
    _fitted_attribute = "coefs_"
    coefs_: list[np.ndarray]
    intercepts_: list[np.ndarray]

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (2048, 2048),
        n_epochs: int = 30,
        batch_size: int = 256,
        learning_rate: float = 1e-3,
        random_state: Any = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.hidden = hidden
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    def fit(  # type: ignore[override]  # has other arguments than the other estimators
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        callbacks: CallbackList = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> Self:
        """Train on rows and the output of a bootstrap network for these rows.

        Rows are read in a random order: a few thousand rows are in memory as they are stored, and one
        minibatch is dense. Rows and outputs are scaled by the mean and deviation of at most 16,384 rows. The
        fit runs in this process, never on a cluster, because its steps are short. No job can run this fit.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Labels are ignored.
        y : Dataset or array-like, shape (n, outputs)
            Output of the same rows: the result of ``transform``, or the dataset that it wrote.
        validation : tuple (X, y), optional
            Other rows and their outputs, whose error is recorded after each epoch.
        run_dir : path, optional
            Folder in which a checkpoint of each epoch is stored.
        resume : bool
            True continues the fit in ``run_dir``; the result is that of an uninterrupted fit.
        callbacks : Callback or sequence of Callback
        engine : mapping, optional
            Options of the engine, which do not change the result.
        verbose : bool or None
            True shows progress; None shows it only in a notebook.

        Returns
        -------
        self

        Raises
        ------
        RunError
            PyTorch is missing, ``device="gpu"`` without a GPU, or ``run_dir`` has another fit.
        DataError
            The output is missing or has another number of rows, or rows contain NaN or infinity.
        ValueError
            A parameter is out of range.

        Examples
        --------
        See the class.
        """
        self._check_params()
        sizes: Any = self.hidden
        hidden = tuple(int(size) for size in (sizes if is_list(sizes) else [sizes]))
        torch = import_torch()
        choose_torch_device(torch, self.device)
        with restored_on_failure(self):
            rows, outputs = self._make_datasets(X, y, "X", reset=True)
            datasets = {"rows": rows, "output": outputs}
            if validation is not None:
                validation_rows = self._make_validation(*rows_and_labels(validation), outputs.n_features)
                datasets |= {"validation rows": validation_rows[0], "validation output": validation_rows[1]}
            datasets = restore_row_ranges(datasets, run_dir if resume else None)
            call = FitCall(self, datasets, run_dir, resume, callbacks, engine or {}, verbose)
            with fit_callbacks(call) as all_callbacks:
                self._fit_network(torch, hidden, call, all_callbacks)
        return self

    def _fit_network(
        self, torch: ModuleType, hidden: tuple[int, ...], call: FitCall, callbacks: Callbacks
    ) -> None:
        rows, outputs = call.rows["rows"], call.rows["output"]
        validation = None
        if "validation rows" in call.rows:
            validation = call.rows["validation rows"], call.rows["validation output"]
        with FitSession(
            self._kind,
            in_process=True,
            run_dir=call.run_dir,
            resume=call.resume,
            callbacks=callbacks,
            device=self.device,
            n_jobs=self.n_jobs,
            engine=call.engine,
        ) as session:
            decides = self._deciding_parameters() | {"hidden": list(hidden)}
            seed = session.begin(self.random_state, decides, call.rows)
            session.notify_start(rows, seed=seed, max_iter=self.n_epochs)
            with torch_threads(torch, resolve_jobs(self.n_jobs)):
                trainer = NetworkTrainer(hidden, float(self.learning_rate), seed, rows, outputs, self.device)
                store = session.store if call.run_dir is not None else None
                history = train(
                    trainer,
                    int(self.n_epochs),
                    self._choose_order(len(rows), seed),
                    (rows, outputs),
                    validation,
                    session.callbacks,
                    store,
                )
            self.coefs_, self.intercepts_ = trainer.export_network()
            session.remove_leftovers()
        self.seed_, self.history_, self.n_iter_ = seed, history, len(history)
        seconds = sum(record["seconds"] for record in history)
        session.callbacks.on_fit_end({"passes": self.n_iter_, "pass_seconds": seconds})

    def _choose_order(self, n_rows: int, seed: int) -> RowOrder:
        """Return a random order of rows that reads contiguous ranges and shuffles the rows of some ranges."""
        run = min(RUN_ROWS, -(-n_rows // BUFFER_RUNS))
        batch = min(int(self.batch_size), n_rows)
        return RowOrder(n_rows, seed, batch, run_rows=run, buffer_runs=BUFFER_RUNS)

    def _make_datasets(self, X: Any, y: Any, name: str, *, reset: bool) -> tuple[Dataset, Dataset]:
        """Return rows ``X`` and their outputs ``y`` as datasets; error messages call the rows ``name``."""
        if y is None:
            raise DataError(
                f"{type(self).__name__} learns from rows and their output: pass y=mbn.transform(X), or the "
                "dataset that transform(X, out=...) wrote"
            )
        rows = self._given_rows(X, name=name, reset=reset)
        if not isinstance(y, Dataset):
            y = opened(y, "the output")
            if is_in_memory(y):
                y = np.asarray(y)
                if y.ndim != 2 or y.dtype.kind not in "buif":
                    raise DataError(
                        f"the output has shape {y.shape} and type {y.dtype}: give an array of numbers (n, "
                        "outputs), as transform of a bootstrap network returns"
                    )
                check_finite(y, "the output")
            y = Dataset.from_arrays(y)
        if len(y) != len(rows):
            raise DataError(
                f"the output has {len(y)} rows for {len(rows)} rows of {name}: give one row of output per row"
            )
        return rows, y

    def _make_validation(self, X: Any, y: Any, width: int) -> tuple[Dataset, Dataset]:
        rows, outputs = self._make_datasets(X, y, "validation", reset=False)
        if outputs.n_features != width:
            raise DataError(
                f"validation: the output has {outputs.n_features} columns, but that of the training rows has "
                f"{width}"
            )
        # Check for NaN here: the fit detects NaN only in training rows, which make the objective NaN.
        for dataset, name in ((rows, "the validation X"), (outputs, "the validation output")):
            if not dataset.known_finite or (dataset.dtype.kind == "f" and dataset.dtype.itemsize > 4):
                check_rows(dataset, name)
        return rows, outputs

    def score(self, X: Any, y: Any) -> float:
        """Return the share of the variance of the outputs that the network explains.

        At most 65,536 rows of a Dataset are in memory at a time.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : Dataset or array-like, shape (n, outputs)

        Returns
        -------
        float
            ``1 - sum |z - f(x)|^2 / sum |z - mean|^2`` for outputs z and predictions f(x); at most 1.

        Raises
        ------
        DataError
            The output has another number of rows, or all outputs are equal.

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        rows, outputs = self._make_datasets(X, y, "X", reset=False)
        off, spread = 0.0, RunningVariance(outputs.n_features)
        for a in range(0, len(rows), SCORE_ROWS):
            b = min(a + SCORE_ROWS, len(rows))
            z = _make_dense(outputs.read_x(a, b)).astype(np.float64)
            off += float(((self._map(rows[a:b], "output") - z) ** 2).sum())
            spread.add(z)
        if spread.squares <= 0:
            raise DataError("all outputs are equal: there is no variance to explain")
        return 1.0 - off / spread.squares

    def _row_map(self, output: object) -> NetworkRows:
        return NetworkRows(tuple(self.coefs_), tuple(self.intercepts_))

    def _add_prediction_nodes(self, graph: OnnxGraph) -> None:
        h = graph.x
        for layer, (w, b) in enumerate(zip(self.coefs_, self.intercepts_, strict=True)):
            h = graph.node("Relu", h) if layer else h
            h = graph.node("Add", graph.node("MatMul", h, graph.constant(w)), graph.constant(b))
        graph.output("output", h, np.float32, ["rows", len(self.intercepts_[-1])])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def _state(self) -> SavedModelState:
        arrays = {f"coef_{i}": w for i, w in enumerate(self.coefs_)}
        return {}, arrays | {f"intercept_{i}": b for i, b in enumerate(self.intercepts_)}

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        layers = range(len(arrays) // 2)
        self.coefs_ = [arrays[f"coef_{i}"] for i in layers]
        self.intercepts_ = [arrays[f"intercept_{i}"] for i in layers]


def import_torch() -> ModuleType:
    """Return the module ``torch``; if it is not installed, raise RunError with the command to install it."""
    try:
        import torch
    except ImportError as error:
        raise RunError(
            "CompressiveMBN.fit needs PyTorch, which is not installed: pip install 'scalelatent[torch]' (a "
            "fitted model predicts without it)"
        ) from error
    return torch


def choose_torch_device(torch: ModuleType, device: str) -> str:
    """Return the name of PyTorch's device, "cuda" or "cpu", for ``device`` "auto", "gpu" or "cpu"."""
    if device not in DEVICES:
        raise ValueError(f"device={device!r} is not one of {', '.join(DEVICES)}")
    if device == "cpu":
        return "cpu"
    found = bool(torch.cuda.is_available())
    if device == "gpu" and not found:
        raise RunError(
            "device='gpu', but PyTorch finds no CUDA device: install its CUDA build on a machine with a GPU, "
            "or use device='cpu'"
        )
    return "cuda" if found else "cpu"


@contextmanager
def torch_threads(torch: ModuleType, threads: int) -> Iterator[None]:
    """Set PyTorch's number of threads in the ``with`` block, and restore it after the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NetworkTrainer:
    """Network in training: weights, optimizer Adam, and scales of the rows ``x`` and outputs ``z``."""

    def __init__(
        self, hidden: tuple[int, ...], learning_rate: float, seed: int, x: Dataset, z: Dataset, device: str
    ) -> None:
        self.torch = import_torch()
        self.device, self.learning_rate = choose_torch_device(self.torch, device), learning_rate
        self.row_scale, self.output_scale = measure_scales(x, z)
        sizes = [x.n_features, *hidden, z.n_features]
        streams = [stream(seed, "compressive-weights", 0, i) for i in range(len(sizes) - 1)]
        biases = [np.zeros(size, np.float32) for size in sizes[1:]]
        pairs = zip(draw_weights(sizes, streams), biases, strict=True)
        self.parameters = [self._to_device(a).requires_grad_(True) for pair in pairs for a in pair]
        self.optimizer = self.torch.optim.Adam(self.parameters, lr=learning_rate)
        self.mean = self._to_device(self.output_scale[0].astype(np.float32))

    def _to_device(self, a: np.ndarray) -> torch.Tensor:
        # Copy uint8 unchanged, because float32 takes four times the bytes. PyTorch has no uint16.
        a = np.array(a) if a.dtype == np.uint8 else np.array(a, dtype=np.float32)
        return self.torch.from_numpy(a).to(self.device)

    def predict(self, x: DenseOrCsr) -> torch.Tensor:
        """Return the network's scaled outputs for rows ``x``: (output - mean) / deviation."""
        shift, scale = self.row_scale
        h = (self._to_device(_make_dense(x)).to(self.torch.float32) - shift) / scale
        last = len(self.parameters) - 2
        for at in range(0, last + 1, 2):
            h = self.torch.addmm(self.parameters[at + 1], h, self.parameters[at])
            if at < last:
                h = self.torch.relu(h)
        return h

    def scale_targets(self, z: DenseOrCsr) -> torch.Tensor:
        """Return scaled outputs for ``z``: (z - mean) / deviation, with one mean per column."""
        return (self._to_device(_make_dense(z)).to(self.torch.float32) - self.mean) / self.output_scale[1]

    def step(self, x: DenseOrCsr, z: DenseOrCsr, share: float) -> float:
        """Take one step of Adam on rows ``x`` and outputs ``z``; return the mean squared error before it.

        ``share`` (0 to 1) is the share of the steps of the fit that are done, which sets the learning rate.
        """
        rate = 0.5 * self.learning_rate * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = ((self.predict(x) - self.scale_targets(z)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def measure_error(self, x: Dataset, z: Dataset) -> float:
        """Return the mean squared error for rows ``x`` and outputs ``z``, as a share of the variance."""
        total, rows = 0.0, max(1, min(EVAL_ROWS, EVAL_VALUES // x.n_features))
        with self.torch.no_grad():
            for a in range(0, len(x), rows):
                b = min(a + rows, len(x))
                off = self.predict(x.read_x(a, b)) - self.scale_targets(z.read_x(a, b))
                total += float((off.double() ** 2).sum())
        return total / (len(x) * z.n_features)

    def export_network(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the weights and biases of each layer, converted for rows and outputs that are not scaled."""
        arrays = [p.detach().cpu().numpy() for p in self.parameters]
        return remove_scales(arrays[::2], arrays[1::2], self.row_scale, self.output_scale)

    def state(self) -> dict[str, np.ndarray | int]:
        """Return the weights, and Adam's running averages of their gradients, for a checkpoint."""
        out: dict[str, np.ndarray | int] = {}
        for i, p in enumerate(self.parameters):
            kept = self.optimizer.state[p]
            out[f"p{i}"] = p.detach().cpu().numpy().copy()
            out[f"m{i}"] = kept["exp_avg"].cpu().numpy().copy()
            out[f"v{i}"] = kept["exp_avg_sq"].cpu().numpy().copy()
            out["steps"] = int(kept["step"])
        return out

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the weights, and Adam's running averages of their gradients, to those of a checkpoint."""
        with self.torch.no_grad():
            for i, p in enumerate(self.parameters):
                p.copy_(self._to_device(state[f"p{i}"]))
                self.optimizer.state[p] = {
                    "step": self.torch.tensor(float(state["steps"])),
                    "exp_avg": self._to_device(state[f"m{i}"]),
                    "exp_avg_sq": self._to_device(state[f"v{i}"]),
                }


def _make_dense(rows: DenseOrCsr) -> np.ndarray:
    return rows if isinstance(rows, np.ndarray) else rows.toarray()


def train(
    trainer: NetworkTrainer,
    n_epochs: int,
    order: RowOrder,
    training: tuple[Dataset, Dataset],
    validation: tuple[Dataset, Dataset] | None,
    callbacks: Callback,
    store: EngineStore | None,
) -> list[dict[str, Any]]:
    """Train until the last epoch, or until a callback asks to stop; return one record per epoch.

    ``training`` and ``validation`` are (rows, outputs); the error of the latter is measured after each epoch.
    ``store`` stores one checkpoint per epoch; if it has one, training continues after it.
    """
    n_rows, history, begin = len(training[0]), [], 0
    if store is not None and (found := store.latest_state(EPOCHS_STAGE)) is not None:
        begin, state, messages = found
        report_unreadable(callbacks, messages)
        trainer.restore(state)
        history += store.load_history(EPOCHS_STAGE, begin)
        callbacks.on_event(
            {"event": "resumed", "stage": EPOCHS_STAGE, "pass": begin, "history": list(history)}
        )
    feeds = [Feed(Reader(ds, shared_cache(), Meter()), order, [0], n_epochs) for ds in training]
    try:
        for epoch in range(begin, n_epochs):
            started, progress, loss = time.perf_counter(), Progress(callbacks, EPOCHS_STAGE, epoch + 1), 0.0
            for step in range(order.n_steps):
                (rows,), (outputs,) = (feed.blocks(epoch, step, callbacks.on_wait) for feed in feeds)
                assert rows is not None
                assert outputs is not None
                share = (epoch * order.n_steps + step) / (n_epochs * order.n_steps)
                loss += trainer.step(rows.x, outputs.x, share) * order.step_rows(step)
                callbacks.on_wait()
                progress(min((step + 1) * order.batch_rows, n_rows), n_rows)
            if not math.isfinite(loss):
                check_rows(training[0], "X")
                check_rows(training[1], "the output")
                raise RunError(
                    "the error of the network is not finite any more: lower learning_rate, for example to a "
                    "tenth"
                )
            record = {
                "pass": epoch + 1,
                "stage": EPOCHS_STAGE,
                "objective": loss / n_rows,
                "train_error": None,
                "validation_error": None if validation is None else trainer.measure_error(*validation),
                "seconds": time.perf_counter() - started,
                "rows": n_rows,
            }
            history.append(record)
            if store is not None:
                store.append_history(EPOCHS_STAGE, record)
                write_checkpoint(
                    store,
                    EPOCHS_STAGE,
                    epoch + 1,
                    trainer.state,
                    callbacks,
                    {"pass": epoch + 1},
                    is_written=False,
                )
            if callbacks.on_pass_end(record):
                break
    finally:
        for feed in feeds:
            feed.close()
    return history


def read_checked_rows(dataset: Dataset, name: str, ranges: list[tuple[int, int]]) -> Iterator[DenseOrCsr]:
    """Yield the rows of ``ranges`` (start, stop) of a dataset, at most 1,024 rows at a time.

    Raise DataError for NaN, infinity and values beyond float32; the message calls the dataset ``name``.
    """
    row_bytes = dataset.nbytes // len(dataset) if dataset.is_sparse else 8 * dataset.n_features
    rows = max(1, min(CHECKED_ROWS, CHECKED_BYTES // max(row_bytes, 1)))
    for start, stop in ranges:
        for a in range(start, stop, rows):
            x = dataset.read_x(a, min(a + rows, stop))
            check_finite(x, f"{name} ({dataset.url})" if dataset.url else name, a)
            yield x


def check_rows(dataset: Dataset, name: str) -> None:
    """Raise DataError if a dataset, called ``name`` in the message, has NaN, infinity or huge values."""
    for _ in read_checked_rows(dataset, name, [(0, len(dataset))]):
        pass


class RunningVariance:
    """Means of columns, and sum of squared deviations from the means, of rows that are added in batches."""

    def __init__(self, columns: int) -> None:
        self.mean = np.zeros(columns)
        self.squares, self._count = 0.0, 0

    def add(self, rows: np.ndarray) -> None:
        part = rows.astype(np.float64)
        mean, count = part.mean(axis=0), self._count + len(part)
        part -= mean
        off = mean - self.mean
        self.squares += float(np.square(part, out=part).sum())
        self.squares += float(off @ off) * self._count * len(part) / count
        self.mean += off * (len(part) / count)
        self._count = count

    def add_sparse(self, values: np.ndarray, count: int) -> None:
        """Add ``count`` numbers of CSR rows, all 0 except ``values``; their deviations are from 0."""
        part = values.astype(np.float64)
        self.squares += float(part @ part)
        self._count += count

    def compute_deviation(self) -> float:
        """Return the standard deviation over all columns, or 1 if it is 0, because scaling divides by it."""
        return float(np.sqrt(self.squares / (self._count * len(self.mean)))) or 1.0


def measure_scales(x: Dataset, z: Dataset) -> tuple[tuple[float, float], tuple[np.ndarray, float]]:
    """Return (mean, deviation) of the rows ``x``, and (means of columns, deviation) of the outputs ``z``.

    They are computed from at most 16,384 rows. For CSR rows, 0 replaces the mean, so that zeros stay zeros.
    """
    rows = RunningVariance(1)
    ranges = space_ranges(len(x), SAMPLED_RANGES * RANGE_ROWS, SAMPLED_RANGES)
    for piece in read_checked_rows(x, "X", ranges):
        if isinstance(piece, np.ndarray):
            rows.add(piece.reshape(-1, 1))
        else:
            rows.add_sparse(piece.data, piece.shape[0] * piece.shape[1])
    outputs = RunningVariance(z.n_features)
    for piece in read_checked_rows(z, "the output", ranges):
        outputs.add(_make_dense(piece))
    return (float(rows.mean[0]), rows.compute_deviation()), (outputs.mean, outputs.compute_deviation())
