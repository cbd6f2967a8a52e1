"""The compressive network: a feed-forward network that learns the output of a bootstrap network.

It is trained with PyTorch, and it predicts faster than the bootstrap network.
"""

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

# Number of rows that `score` reads at a time.
SCORE_ROWS = 2**16
# Name of the checkpoints in a run folder; there is one per epoch.
EPOCHS_STAGE = "compressive_epochs"
# Rows are read in contiguous ranges of at most RUN_ROWS rows. The rows of BUFFER_RUNS ranges are shuffled.
RUN_ROWS, BUFFER_RUNS = 1024, 16
# Upper bounds of the rows whose validation error is computed at a time: number of rows, and number of values
# in these rows.
EVAL_ROWS, EVAL_NUMBERS = 4096, 2**24
# The mean and deviation of rows and outputs are computed from this many ranges of this many rows.
SAMPLED_RANGES, RANGE_ROWS = 64, 256
# Upper bounds of the rows that are checked for NaN at a time: number of rows, and bytes of their values as
# float64 (of CSR rows: as stored).
PIECE_ROWS, PIECE_BYTES = 1024, 2**24


class CompressiveMBN(StreamedEstimator):
    """Compressive multilayer bootstrap network: a feed-forward network that learns the output of an MBN.

    A bootstrap network predicts slowly, because it compares each row with all centroids. The feed-forward
    network learns its output for the training rows, and predicts in its place (sections 2.4 and 5.6 of the
    paper).

    Parameters
    ----------
    hidden : sequence of int
        Rectified linear units of each hidden layer; the paper uses (2048, 2048).
    n_epochs : int
        Passes over the rows.
    batch_size : int
        Rows of a step.
    learning_rate : float
        Learning rate of Adam at the first step; it falls to 0 along half a cosine.
    random_state : int, Generator, RandomState or None
        Seed of the initial weights and of the order of rows.
    device : {"auto", "cpu", "gpu"}
        "auto" trains on a GPU if PyTorch finds one, and predicts on a GPU if CuPy finds one.
    n_jobs : int or None
        Threads; None: the setting of ``joblib.parallel_config``, else all cores.

    Attributes
    ----------
    coefs_ : list of ndarray of float32, shape (inputs, outputs) each
    intercepts_ : list of ndarray of float32, shape (outputs,) each
    n_iter_ : int
        Number of epochs.
    history_ : list of dict
        One record per epoch: ``objective`` is the mean squared error of the training rows during the epoch,
        ``validation_error`` that of the validation rows after it; both are divided by the variance of the
        outputs.
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
        """Learn from rows and the output of a bootstrap network for these rows.

        Rows are read when they are needed, in a random order: a few thousand rows are in memory in their
        stored form, and one batch is dense. The scales come from at most 16,384 rows. The fit runs in this
        process, also inside ``with sl.cluster(…)``, because its steps are too short for a cluster. Job files
        cannot run it.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Labels are ignored.
        y : Dataset or array-like, shape (n, outputs)
            Output of the same rows: the result of ``transform``, or the dataset that it wrote.
        validation : pair of the same, optional
            Rows and outputs whose error is recorded after each epoch.
        run_dir : path, optional
            Folder for a checkpoint of each epoch.
        resume : bool
            Continue the fit in ``run_dir``; the result is that of an uninterrupted fit.
        callbacks : Callback or sequence of Callback
        engine : mapping, optional
            Options of the engine, which do not change the result.
        verbose : bool or None
            Show progress. None: only in a notebook.

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
            rows, outputs = self._make_pair(X, y, "X", reset=True)
            watched = {"rows": rows, "output": outputs}
            if validation is not None:
                validation_rows = self._make_validation_pair(*rows_and_labels(validation), outputs.n_features)
                watched |= {"validation rows": validation_rows[0], "validation output": validation_rows[1]}
            watched = restore_row_ranges(watched, run_dir if resume else None)
            call = FitCall(self, watched, run_dir, resume, callbacks, engine or {}, verbose)
            with fit_callbacks(call) as everyone:
                self._learn(torch, hidden, call, everyone)
        return self

    def _learn(self, torch: ModuleType, hidden: tuple[int, ...], call: FitCall, callbacks: Callbacks) -> None:
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
        """Return the random order of rows: contiguous ranges, whose rows are shuffled in a buffer."""
        run = min(RUN_ROWS, -(-n_rows // BUFFER_RUNS))
        batch = min(int(self.batch_size), n_rows)
        return RowOrder(n_rows, seed, batch, run_rows=run, buffer_runs=BUFFER_RUNS)

    def _make_pair(self, X: Any, y: Any, name: str, *, reset: bool) -> tuple[Dataset, Dataset]:
        """Return rows ``X`` (called ``name`` in messages) and their outputs ``y`` as datasets."""
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

    def _make_validation_pair(self, X: Any, y: Any, width: int) -> tuple[Dataset, Dataset]:
        rows, outputs = self._make_pair(X, y, "validation", reset=False)
        if outputs.n_features != width:
            raise DataError(
                f"validation: the output has {outputs.n_features} columns, but that of the training rows has "
                f"{width}"
            )
        # Bad training rows make the objective NaN, which the fit detects. Bad validation rows would not be
        # detected later, so they are checked here.
        for dataset, name in ((rows, "the validation X"), (outputs, "the validation output")):
            if not dataset.known_finite or (dataset.dtype.kind == "f" and dataset.dtype.itemsize > 4):
                check_rows(dataset, name)
        return rows, outputs

    def score(self, X: Any, y: Any) -> float:
        """Return the share of the variance of the outputs that the network explains.

        The rows of a Dataset are read in parts.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
        y : Dataset or array-like, shape (n, outputs)

        Returns
        -------
        float
            ``1 - sum |z - f(x)|^2 / sum |z - mean|^2``; at most 1.

        Raises
        ------
        DataError
            As for ``fit``, or all outputs are equal.

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        rows, outputs = self._make_pair(X, y, "X", reset=False)
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


# -- training ---------------------------------------------------------------------------------------------


def import_torch() -> ModuleType:
    """Return the module ``torch``; if it is missing, raise a `RunError` with the command to install it."""
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
    """Let PyTorch use this number of threads in the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class NetworkTrainer:
    """Weights, Adam optimizer and scales of a network in training, on the device of PyTorch."""

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
        # uint8 is moved as uint8; types that PyTorch does not know (uint16) are moved as float32.
        a = np.array(a) if a.dtype == np.uint8 else np.array(a, dtype=np.float32)
        return self.torch.from_numpy(a).to(self.device)

    def predict(self, x: DenseOrCsr) -> torch.Tensor:
        """Return the outputs for rows ``x`` minus the means of the targets, divided by the deviation."""
        shift, scale = self.row_scale
        h = (self._to_device(_make_dense(x)).to(self.torch.float32) - shift) / scale
        last = len(self.parameters) - 2
        for at in range(0, last + 1, 2):
            h = self.torch.addmm(self.parameters[at + 1], h, self.parameters[at])
            if at < last:
                h = self.torch.relu(h)
        return h

    def scale_targets(self, z: DenseOrCsr) -> torch.Tensor:
        """Return the training outputs ``z`` minus the means of their columns, divided by the deviation."""
        return (self._to_device(_make_dense(z)).to(self.torch.float32) - self.mean) / self.output_scale[1]

    def step(self, x: DenseOrCsr, z: DenseOrCsr, share: float) -> float:
        """Take one step of Adam on rows and outputs; return the mean squared error before the step.

        ``share`` (0 to 1) is the part of all steps that is completed; it determines the learning rate.
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
        """Return the mean squared error over a dataset, divided by the variance of the training outputs."""
        total, rows = 0.0, max(1, min(EVAL_ROWS, EVAL_NUMBERS // x.n_features))
        with self.torch.no_grad():
            for a in range(0, len(x), rows):
                b = min(a + rows, len(x))
                off = self.predict(x.read_x(a, b)) - self.scale_targets(z.read_x(a, b))
                total += float((off.double() ** 2).sum())
        return total / (len(x) * z.n_features)

    def export_network(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return (weights, biases) of the network for rows and outputs that are not scaled."""
        arrays = [p.detach().cpu().numpy() for p in self.parameters]
        return remove_scales(arrays[::2], arrays[1::2], self.row_scale, self.output_scale)

    def state(self) -> dict[str, np.ndarray | int]:
        """Return the parameters, and Adam's running averages of their gradients, for a checkpoint."""
        out: dict[str, np.ndarray | int] = {}
        for i, p in enumerate(self.parameters):
            kept = self.optimizer.state[p]
            out[f"p{i}"] = p.detach().cpu().numpy().copy()
            out[f"m{i}"] = kept["exp_avg"].cpu().numpy().copy()
            out[f"v{i}"] = kept["exp_avg_sq"].cpu().numpy().copy()
            out["steps"] = int(kept["step"])
        return out

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the parameters, and Adam's running averages of their gradients, from a checkpoint."""
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
    pair: tuple[Dataset, Dataset],
    validation: tuple[Dataset, Dataset] | None,
    callbacks: Callback,
    store: EngineStore | None,
) -> list[dict[str, Any]]:
    """Train on a pair (rows, outputs) until the last epoch or until a callback asks to stop.

    ``validation``, if given, is a pair (rows, outputs) whose error is measured after each epoch. ``store``,
    if given, stores one checkpoint per epoch. Return one record per epoch.
    """
    n_rows, history, begin = len(pair[0]), [], 0
    if store is not None and (found := store.latest_state(EPOCHS_STAGE)) is not None:
        begin, state, messages = found
        report_unreadable(callbacks, messages)
        trainer.restore(state)
        history += store.load_history(EPOCHS_STAGE, begin)
        callbacks.on_event(
            {"event": "resumed", "stage": EPOCHS_STAGE, "pass": begin, "history": list(history)}
        )
    feeds = [Feed(Reader(ds, shared_cache(), Meter()), order, [0], n_epochs) for ds in pair]
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
                check_rows(pair[0], "X")
                check_rows(pair[1], "the output")
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


# -- scales -----------------------------------------------------------------------------------------------


def check_pieces(dataset: Dataset, name: str, runs: list[tuple[int, int]]) -> Iterator[DenseOrCsr]:
    """Yield the rows of the ranges ``runs``, pairs (start, stop), in parts of a few megabytes.

    Raise DataError for NaN, infinity and values beyond float32; ``name`` is the dataset in the message.
    """
    row_bytes = dataset.nbytes // len(dataset) if dataset.is_sparse else 8 * dataset.n_features
    rows = max(1, min(PIECE_ROWS, PIECE_BYTES // max(row_bytes, 1)))
    for start, stop in runs:
        for a in range(start, stop, rows):
            x = dataset.read_x(a, min(a + rows, stop))
            check_finite(x, f"{name} ({dataset.url})" if dataset.url else name, a)
            yield x


def check_rows(dataset: Dataset, name: str) -> None:
    """Read all rows; raise DataError for NaN, infinity and values beyond float32."""
    for _ in check_pieces(dataset, name, [(0, len(dataset))]):
        pass


class RunningVariance:
    """Means of columns, and sum of squared deviations from the means, of rows that are added in parts."""

    def __init__(self, columns: int) -> None:
        self.mean = np.zeros(columns)
        self.squares, self._count = 0.0, 0

    def add(self, rows: np.ndarray) -> None:
        """Add the rows (n, columns) to the means and to the sum of squared deviations."""
        part = rows.astype(np.float64)
        mean, count = part.mean(axis=0), self._count + len(part)
        part -= mean
        off = mean - self.mean
        self.squares += float(np.square(part, out=part).sum())
        self.squares += float(off @ off) * self._count * len(part) / count
        self.mean += off * (len(part) / count)
        self._count = count

    def add_sparse(self, values: np.ndarray, count: int) -> None:
        """Add ``count`` numbers of CSR rows, of which only ``values`` are not 0; leave the mean at 0.

        CSR rows are scaled without subtracting a mean.
        """
        part = values.astype(np.float64)
        self.squares += float(part @ part)
        self._count += count

    def compute_deviation(self) -> float:
        """Return the root mean squared deviation over all columns, or 1 if it is 0."""
        return float(np.sqrt(self.squares / (self._count * len(self.mean)))) or 1.0


def measure_scales(x: Dataset, z: Dataset) -> tuple[tuple[float, float], tuple[np.ndarray, float]]:
    """Return (mean, deviation) of the rows ``x``, and (means of columns, deviation) of the outputs ``z``.

    At most 16,384 evenly spaced rows are read. The mean of CSR rows is 0.
    """
    rows = RunningVariance(1)
    ranges = space_ranges(len(x), SAMPLED_RANGES * RANGE_ROWS, SAMPLED_RANGES)
    for piece in check_pieces(x, "X", ranges):
        if isinstance(piece, np.ndarray):
            rows.add(piece.reshape(-1, 1))
        else:
            rows.add_sparse(piece.data, piece.shape[0] * piece.shape[1])
    outputs = RunningVariance(z.n_features)
    for piece in check_pieces(z, "the output", ranges):
        outputs.add(_make_dense(piece))
    return (float(rows.mean[0]), rows.compute_deviation()), (outputs.mean, outputs.compute_deviation())
