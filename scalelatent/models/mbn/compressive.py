"""A compressive network: learned from a bootstrap network's output in PyTorch, fast to predict with."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from scalelatent.estimators.base import Saved, StreamedEstimator
from scalelatent.estimators.fit_services import FitCall, fit_callbacks, restored_on_failure
from scalelatent.estimators.inputs import check_finite, is_plain, rows_and_labels
from scalelatent.estimators.onnx_graph import RowGraph
from scalelatent.estimators.session import CallbackList, FitSession, restore_row_ranges
from scalelatent.kernels.arrays import DenseOrCsr
from scalelatent.kernels.streams import stream
from scalelatent.models.mbn.model.compressive import NetworkRows, first_weights, unscaled

from .parameters import COMPRESSIVE

if TYPE_CHECKING:
    import torch

SCORE_ROWS = 2**16
STAGE = "compressive_epochs"
RUN_ROWS, BUFFER_RUNS = 1024, 16
# Rows that an error is taken of at a time, and how many numbers they may be.
EVAL_ROWS, EVAL_NUMBERS = 4096, 2**24
SAMPLED_PLACES, SAMPLED_ROWS = 64, 256
# Of a piece: rows, and bytes of them as float64 (of CSR rows, as they are stored).
PIECE_ROWS, PIECE_BYTES = 1024, 2**24


class CompressiveMBN(StreamedEstimator):
    """Compressive multilayer bootstrap network: a feed-forward network learns rows -> output of an MBN.

    A bootstrap network predicts slowly, since each row is held against all centroids. The network here learns
    what it put out for its training rows, and predicts in its place (the paper's sections 2.4 and 5.6).

    Parameters
    ----------
    hidden : sequence of int
        Rectified linear units of each hidden layer; the paper's is (2048, 2048).
    n_epochs : int
        Times that each row is seen.
    batch_size : int
        Rows of a step.
    learning_rate : float
        Of Adam at the first step; falls to 0 along half a cosine.
    random_state : int, Generator, RandomState or None
        Decides the first weights and the order of rows.
    device : {"auto", "cpu", "gpu"}
        "auto" learns on a GPU where PyTorch finds one, and predicts on one where CuPy does.
    n_jobs : int or None
        Threads; None is what ``joblib.parallel_config`` says, else all cores.

    Attributes
    ----------
    coefs_ : list of ndarray of float32, shape (inputs, outputs) each
    intercepts_ : list of ndarray of float32, shape (outputs,) each
    n_iter_ : int
        Epochs.
    history_ : list of dict
        A record an epoch: ``objective`` is the mean squared error of the training rows, and
        ``validation_error`` that of the validation rows after it, both divided by the variance of the
        outputs.
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``transform`` gives what the bootstrap network would have put out, as far as it was learned: float32 (n,
    outputs). ``fit`` needs PyTorch (``pip install 'scalelatent[torch]'``); a fitted or loaded one predicts
    with numpy or CuPy alone. On one machine and with one number of threads a fit gives the same bits again.

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

    def fit(  # type: ignore[override]  # it runs in this process, whatever encloses it
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
        """Learn from rows and what a bootstrap network put out for them.

        Rows are read as they are needed, in an order that the seed decides; a few thousand are in memory as
        they are stored, and a batch as numbers (of sparse rows too). Scales are taken of at most 16,384 rows,
        a few megabytes at a time.
        Learns in this process, also within ``with sl.cluster(…)``: steps follow each other too closely to
        be shared out. Job files do not fit it.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            Its labels are not looked at.
        y : Dataset or array-like, shape (n, outputs)
            The output of the same rows: what ``transform`` returned, or the dataset that it wrote.
        validation : pair of the same, optional
            Their error is told after each epoch.
        run_dir : path, optional
            Keep each epoch as a checkpoint there.
        resume : bool
            Go on with the fit that ``run_dir`` holds; the result is that of an undisturbed fit.
        callbacks : Callback or sequence of Callback
        engine : mapping, optional
            Options of the engine; none changes the result.
        verbose : bool or None
            Show progress: a display that moves on a terminal and in a notebook, lines elsewhere. None: in a
            notebook alone.

        Returns
        -------
        self

        Raises
        ------
        RunError
            No PyTorch; ``device="gpu"`` without a GPU; ``run_dir`` holds another fit.
        DataError
            No output, or one of another number of rows; NaN or infinity, also among the validation rows.
        ValueError
            A parameter that makes no sense.

        Examples
        --------
        See the class.
        """
        self._check_params()
        sizes: Any = self.hidden
        hidden = tuple(int(size) for size in (sizes if is_list(sizes) else [sizes]))
        torch = import_torch()
        torch_device(torch, self.device)
        with restored_on_failure(self):
            rows, outputs = self._pairs(X, y, "X", reset=True)
            watched = {"rows": rows, "output": outputs}
            if validation is not None:
                held = self._held(*rows_and_labels(validation), outputs.n_features)
                watched |= {"validation rows": held[0], "validation output": held[1]}
            watched = restore_row_ranges(watched, run_dir if resume else None)
            call = FitCall(self, watched, run_dir, resume, callbacks, engine or {}, verbose)
            with fit_callbacks(call) as everyone:
                self._learn(torch, hidden, call, everyone)
        return self

    def _learn(self, torch: ModuleType, hidden: tuple[int, ...], call: FitCall, callbacks: Callbacks) -> None:
        rows, outputs = call.rows["rows"], call.rows["output"]
        held = None
        if "validation rows" in call.rows:
            held = call.rows["validation rows"], call.rows["validation output"]
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
            session.announce(rows, seed=seed, max_iter=self.n_epochs)
            training = Training(
                hidden, int(self.n_epochs), int(self.batch_size), float(self.learning_rate), seed
            )
            with torch_threads(torch, resolve_jobs(self.n_jobs)):
                trainer = Trainer(training, rows, outputs, self.device)
                store = session.store if call.run_dir is not None else None
                history = train(trainer, rows, outputs, held, session.callbacks, store)
            self.coefs_, self.intercepts_ = trainer.network()
            session.finish()
        self.seed_, self.history_, self.n_iter_ = seed, history, len(history)
        seconds = sum(record["seconds"] for record in history)
        session.callbacks.on_fit_end({"passes": self.n_iter_, "pass_seconds": seconds})

    def _pairs(self, X: Any, y: Any, what: str, *, reset: bool) -> tuple[Dataset, Dataset]:
        """Rows, and the outputs that belong to them, as datasets."""
        if y is None:
            raise DataError(
                f"{type(self).__name__} learns from rows and their outputs: pass y=mbn.transform(X), or the "
                "dataset that transform(X, out=...) wrote"
            )
        rows = self._given_rows(X, what=what, reset=reset)
        if not isinstance(y, Dataset):
            y = opened(y, "the output")
            if is_plain(y):
                y = np.asarray(y)
                if y.ndim != 2 or y.dtype.kind not in "buif":
                    raise DataError(
                        f"the output has shape {y.shape} and type {y.dtype}: give numbers (n, outputs), what "
                        "transform of a bootstrap network returns"
                    )
                check_finite(y, "the output")
            y = Dataset.from_arrays(y)
        if len(y) != len(rows):
            raise DataError(f"the output has {len(y)} rows for {len(rows)} rows of {what}: give one for each")
        return rows, y

    def _held(self, X: Any, y: Any, width: int) -> tuple[Dataset, Dataset]:
        rows, outputs = self._pairs(X, y, "validation", reset=False)
        if outputs.n_features != width:
            raise DataError(
                f"validation: the output has {outputs.n_features} columns, that of the training rows {width}"
            )
        # Of the training rows the objective tells; an error of the validation rows would be nan in silence.
        for dataset, what in ((rows, "the validation X"), (outputs, "the validation output")):
            if not surely_fine(dataset):
                check_rows(dataset, what)
        return rows, outputs

    def score(self, X: Any, y: Any) -> float:
        """Share of the outputs' variance that the network explains; streams over Datasets.

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
            As ``fit``; outputs that are all the same.

        Examples
        --------
        See the class.
        """
        check_is_fitted(self)
        rows, outputs = self._pairs(X, y, "X", reset=False)
        off, first, second = 0.0, np.zeros(outputs.n_features), 0.0
        # Around one of them, so that the variance is not lost in the squares.
        origin = outputs.read_x(0, 1).astype(np.float64)[0]
        for a in range(0, len(rows), SCORE_ROWS):
            b = min(a + SCORE_ROWS, len(rows))
            z = outputs.read_x(a, b).astype(np.float64) - origin
            off += float(((self._map(rows[a:b], "output") - origin - z) ** 2).sum())
            first += z.sum(axis=0)
            second += float((z**2).sum())
        spread = second - float(first @ first) / len(rows)
        if spread <= 0:
            raise DataError("the outputs are all the same: there is no variance to explain")
        return 1.0 - off / spread

    def _row_map(self, what: object) -> NetworkRows:
        return NetworkRows(tuple(self.coefs_), tuple(self.intercepts_))

    def _draw_prediction(self, graph: RowGraph) -> None:
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

    def _state(self) -> Saved:
        arrays = {f"coef_{i}": w for i, w in enumerate(self.coefs_)}
        return {}, arrays | {f"intercept_{i}": b for i, b in enumerate(self.intercepts_)}

    def _restore(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        layers = range(len(arrays) // 2)
        self.coefs_ = [arrays[f"coef_{i}"] for i in layers]
        self.intercepts_ = [arrays[f"intercept_{i}"] for i in layers]


# -- training ---------------------------------------------------------------------------------------------


def import_torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise RunError(
            "CompressiveMBN learns by PyTorch, which is not installed here: pip install 'scalelatent[torch]' "
            "(a fitted one predicts without it)"
        ) from error
    return torch


def torch_device(torch: ModuleType, device: str) -> str:
    """``"cuda"`` or ``"cpu"`` for ``device`` "auto", "gpu" or "cpu"."""
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
def torch_threads(torch: ModuleType, threads: int) -> Iterator[None]:
    """So many threads for PyTorch inside; what was set before is restored."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Training:
    """How a network is trained."""

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


def _dense(rows: DenseOrCsr) -> np.ndarray:
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

    def _parameter(self, a: np.ndarray) -> torch.Tensor:
        return self._to_device(a).requires_grad_(True)

    def _to_device(self, a: np.ndarray) -> torch.Tensor:
        # Bytes travel as bytes; what PyTorch does not know (uint16) travels as float32.
        a = np.array(a) if a.dtype == np.uint8 else np.array(a, dtype=np.float32)
        return self.torch.from_numpy(a).to(self.device)

    def outputs(self, x: np.ndarray) -> torch.Tensor:
        """Scaled outputs of rows."""
        shift, scale = self.of_rows
        h = (self._to_device(x).to(self.torch.float32) - shift) / scale
        last = len(self.parameters) - 2
        for at in range(0, last + 1, 2):
            h = self.torch.addmm(self.parameters[at + 1], h, self.parameters[at])
            if at < last:
                h = self.torch.relu(h)
        return h

    def targets(self, z: np.ndarray) -> torch.Tensor:
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

    def state(self) -> dict[str, np.ndarray | int]:
        """All that training goes on from."""
        out: dict[str, np.ndarray | int] = {}
        for i, p in enumerate(self.parameters):
            kept = self.optimizer.state[p]
            out[f"p{i}"] = p.detach().cpu().numpy().copy()
            out[f"m{i}"] = kept["exp_avg"].cpu().numpy().copy()
            out[f"v{i}"] = kept["exp_avg_sq"].cpu().numpy().copy()
            out["steps"] = int(kept["step"])
        return out

    def restore(self, state: Mapping[str, Any]) -> None:
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
    store: EngineStore | None,
) -> list[dict[str, Any]]:
    """Train to the end, or until a callback says so; returns a record an epoch."""
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


def _resume(
    trainer: Trainer, store: EngineStore | None, history: list[dict[str, Any]], callbacks: Callback
) -> int:
    found = None if store is None else store.latest_state(STAGE)
    if store is None or found is None:
        return 0
    epoch, state, messages = found
    report_unreadable(callbacks, messages)
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


# -- scales -----------------------------------------------------------------------------------------------


def pieces(dataset: Dataset, runs: list[tuple[int, int]]) -> Iterator[tuple[int, DenseOrCsr]]:
    """(number of the first row, rows) of runs of rows, a few megabytes at a time."""
    row_bytes = dataset.nbytes // len(dataset) if dataset.is_sparse else 8 * dataset.n_features
    rows = max(1, min(PIECE_ROWS, PIECE_BYTES // max(row_bytes, 1)))
    for start, stop in runs:
        for a in range(start, stop, rows):
            yield a, dataset.read_x(a, min(a + rows, stop))


def check_rows(dataset: Dataset, what: str) -> None:
    """Refuse NaN, infinity and numbers beyond float32; reads all rows."""
    for first, x in pieces(dataset, [(0, len(dataset))]):
        check_finite(x, _named(dataset, what), first)


def surely_fine(dataset: Dataset) -> bool:
    """Whether :func:`check_rows` need not read to find nothing."""
    return dataset.known_finite and (dataset.dtype.kind != "f" or dataset.dtype.itemsize <= 4)


def scales(x: Dataset, z: Dataset) -> tuple[tuple[float, float], tuple[np.ndarray, float]]:
    """((shift, scale) of rows, (mean, size) of outputs), one number for all columns but for the mean; of some
    thousand rows from evenly spaced places.
    """
    rows = Spread(1)
    for piece in _sampled(x, "X"):
        if isinstance(piece, np.ndarray):
            rows.add(piece.reshape(-1, 1))
        else:
            rows.add_squares(piece.data, piece.shape[0] * piece.shape[1])
    outputs = Spread(z.n_features)
    for piece in _sampled(z, "the output"):
        outputs.add(piece if isinstance(piece, np.ndarray) else piece.toarray())
    return (float(rows.mean[0]), rows.size() or 1.0), (outputs.mean, outputs.size() or 1.0)


class Spread:
    """Means of columns and the mean square around them, of rows that come piece by piece."""

    def __init__(self, columns: int) -> None:
        self.mean = np.zeros(columns)
        self._count, self._squares = 0, 0.0

    def add(self, rows: np.ndarray) -> None:
        """More rows, (n, columns)."""
        part = rows.astype(np.float64)
        mean, count = part.mean(axis=0), self._count + len(part)
        part -= mean
        off = mean - self.mean
        self._squares += float(np.square(part, out=part).sum())
        self._squares += float(off @ off) * self._count * len(part) / count
        self.mean += off * (len(part) / count)
        self._count = count

    def add_squares(self, values: np.ndarray, count: int) -> None:
        """So many numbers around 0, of which all but ``values`` are 0; not to be mixed with :meth:`add`."""
        part = values.astype(np.float64)
        self._squares += float(part @ part)
        self._count += count

    def size(self) -> float:
        """Root of the mean square, over all columns."""
        return float(np.sqrt(self._squares / (self._count * len(self.mean))))


def _sampled(dataset: Dataset, what: str) -> Iterator[DenseOrCsr]:
    runs = space_ranges(len(dataset), SAMPLED_PLACES * SAMPLED_ROWS, SAMPLED_PLACES)
    for first, x in pieces(dataset, runs):
        check_finite(x, _named(dataset, what), first)
        yield x


def _named(dataset: Dataset, what: str) -> str:
    return f"{what} ({dataset.url})" if dataset.url else what
