"""Create a dataset on disk, resume an unfinished dataset, and copy rows into a new dataset."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.data import schema
from scalelatent.data.csr import check_dtype
from scalelatent.data.csr_store import create_csr
from scalelatent.data.feature_names import NAMES_ARRAY, as_names, write_names
from scalelatent.data.layout import (
    MAX_RATIO,
    WRITE_CONFIG,
    ChunkLayout,
    choose_csr_layout,
    choose_layout,
    make_codecs,
)
from scalelatent.data.read.stored import read_attrs
from scalelatent.data.schema import DatasetAttrs
from scalelatent.errors import DataError
from scalelatent.storage.disk import REMOVED, Location, locate
from scalelatent.storage.write_checks import (
    check_not_own_input,
    check_space,
    clear_on_failure,
    explain_os_errors,
    format_of,
)

from .batches import RowBatch, write_shards
from .shards import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Unpack

    import numpy.typing as npt
    import zarr

    from scalelatent.data.dataset import Dataset
    from scalelatent.data.schema import LayoutOptions


def begin_dataset(
    url: str | os.PathLike[str],
    n_rows: int,
    feature_shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    *,
    y_dtype: npt.DTypeLike | None = None,
    y_kind: str = "labels",
    n_targets: int | None = None,
    classes: npt.ArrayLike | None = None,
    nnz: int | None = None,
    weighted: bool = False,
    feature_names: Sequence[str] | np.ndarray | None = None,
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    compressor: str | None = "auto",
    tile_columns: int | None = None,
    provenance: dict[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Location:
    """Create the arrays of a dataset or, to resume, check the existing arrays; see `create_dataset`."""
    location = locate(url)
    if n_rows < 1:
        raise DataError(
            f"{location.url}: {n_rows} rows were requested (n_rows), but a dataset has at least 1 row"
        )
    check = schema.check_rows_dtype if nnz is None else check_dtype
    kind = schema.check_stored_dtype(check(np.dtype(dtype), f"{location.url}: x"), f"{location.url}: x")
    _check_kinds(location.url, feature_shape, nnz, y_dtype, y_kind, n_targets)
    names = None if classes is None else np.unique(schema.as_labels(classes, "classes"))
    names = None if names is None else schema.as_classes(names, f"{location.url}: y")
    coded = names is not None and names.dtype.kind == "U"
    y_type = None if y_dtype is None else np.dtype(y_dtype).newbyteorder("=")
    if names is not None and coded:
        y_type = np.min_scalar_type(len(names) - 1)
    elif y_type is not None:
        if y_kind == "multilabel":
            y_type = check_dtype(y_type, f"{location.url}: y")
        schema.check_stored_dtype(y_type, f"{location.url}: y")
        if y_type.kind not in "buif":
            raise DataError(
                f"{location.url}: labels of dtype {y_type} are stored as codes of classes; pass `classes`"
            )
    shape = tuple(int(s) for s in feature_shape)
    features = as_names(feature_names, shape, location.url)
    attrs = DatasetAttrs(
        feature_shape=shape,
        classes=None if names is None else names.tolist(),
        codes=coded,
        provenance={**(provenance or {}), "scalelatent": schema.software()},
        x_kind="dense" if nnz is None else "csr",
        y_kind=y_kind,
        n_targets=n_targets,
        columns=[
            "x",
            *["y"] * (y_type is not None),
            *["weight"] * weighted,
            *[NAMES_ARRAY] * (features is not None),
        ],
    )
    sizes: dict[str, Any] = {"chunk_rows": chunk_rows, "shard_rows": shard_rows, "compressor": compressor}
    if tile_columns is not None:
        if nnz is not None or len(attrs.feature_shape) != 1 or y_type is not None or weighted:
            raise DataError(
                f"{location.url}: tile_columns={tile_columns} is only possible for dense rows of one axis "
                "without labels or weights; leave it out"
            )
        sizes["tile_columns"] = tile_columns
    if y_kind == "targets" and y_type is not None and n_targets is not None:
        sizes["target_bytes"] = n_targets * y_type.itemsize
    if nnz is None:
        layout = choose_layout(n_rows, attrs.feature_shape, kind, **sizes)
    else:
        layout = choose_csr_layout(n_rows, nnz, kind, **sizes)
    # The table of digests is created last, so its presence means that all arrays were created.
    if resume and location.has("digest/zarr.json") and format_of(location) != REMOVED:
        _check_resumed(location, n_rows, attrs, kind, y_type, weighted, layout if shard_rows else None)
        return location
    check_room(location, overwrite, unfinished=resume)
    check_rows_fit(location, n_rows, attrs.feature_shape, kind, nnz, compressor=layout.compressor)
    with explain_os_errors(location, "removing the old content"):
        if not location.is_empty():
            location.clear()
    keep = contextlib.nullcontext() if resume else clear_on_failure(location)
    with explain_os_errors(location, "creating the dataset"), keep:
        import zarr

        group = zarr.create_group(location.zarr_store(read_only=False), attributes=attrs.to_json())
        _create_columns(group, n_rows, attrs, kind, y_type, layout)
        if features is not None:
            write_names(group, features)
        n_shards = layout.n_shards(n_rows) * layout.n_tiles(schema.n_features(attrs.feature_shape))
        group.create_array(
            "digest",
            shape=(n_shards, 16),
            dtype="u1",
            chunks=(n_shards, 16),
            fill_value=0,
            dimension_names=("shard", "digest_byte"),
        )
    return location


def _create_columns(
    group: zarr.Group,
    n_rows: int,
    attrs: DatasetAttrs,
    dtype: np.dtype,
    y_dtype: np.dtype | None,
    layout: ChunkLayout,
) -> None:
    """Create the arrays of all columns of a dataset, without rows, in the zarr group of the dataset."""
    if attrs.x_kind == "csr":
        shape = (n_rows, attrs.feature_shape[0])
        create_csr(group, "x", shape, dtype, layout.shard_rows, layout.compressor)
    else:
        _create_dense(group, "x", (n_rows, *attrs.feature_shape), dtype, layout)
    # A 1-D column has one chunk per shard of x, so that each shard has one writer in every array.
    whole_shards = ChunkLayout(layout.shard_rows, layout.shard_rows, "zstd")
    if y_dtype is not None:
        y_shape = (n_rows, *(() if attrs.n_targets is None else (attrs.n_targets,)))
        if attrs.y_kind == "multilabel":
            create_csr(group, "y", (n_rows, y_shape[1]), y_dtype, layout.shard_rows, "auto")
        elif attrs.y_kind == "targets":
            compressor = None if y_dtype.kind == "f" else "lz4"
            targets = ChunkLayout(layout.chunk_rows, layout.shard_rows, compressor)
            _create_dense(group, "y", y_shape, y_dtype, targets)
        else:
            _create_dense(group, "y", y_shape, y_dtype, whole_shards)
    if "weight" in (attrs.columns or ()):
        _create_dense(group, "weight", (n_rows,), np.dtype(np.float64), whole_shards)


def _create_dense(
    group: zarr.Group, name: str, shape: tuple[int, ...], dtype: np.dtype, layout: ChunkLayout
) -> None:
    """Create an array whose missing chunks are lost chunks, because zarr also writes chunks of zeros."""
    rest = shape[1:]
    sharded = layout.shard_rows > layout.chunk_rows
    columns = rest if layout.tile_columns is None else (min(layout.tile_columns, *rest),)
    group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=(layout.chunk_rows, *columns),
        shards=(layout.shard_rows, *rest) if sharded else None,
        compressors=make_codecs(layout.compressor, dtype),
        dimension_names=("row", *(f"{'feature' if name == 'x' else 'target'}_{i}" for i in range(len(rest)))),
        fill_value=0,
        config=WRITE_CONFIG,
    )


def check_rows_fit(
    location: Location,
    n_rows: int,
    feature_shape: tuple[int, ...],
    dtype: np.dtype,
    nnz: int | None = None,
    *,
    compressor: str | None = "auto",
    copies: int = 1,
) -> None:
    """Raise a `DataError` if the disk of the location has no space for `copies` copies of the rows."""
    numbers = schema.n_features(feature_shape) * n_rows if nnz is None else nnz
    name = f"{n_rows:,} rows of shape {feature_shape} and dtype {dtype}"
    if copies > 1:
        name = f"{copies} copies of {name}"
    is_plain = compressor is None or (compressor == "auto" and dtype.kind == "f")
    nbytes = copies * numbers * dtype.itemsize
    check_space(location, name, nbytes, nbytes if is_plain else nbytes // MAX_RATIO)


def _check_kinds(
    url: str,
    feature_shape: tuple[int, ...],
    nnz: int | None,
    y_dtype: npt.DTypeLike | None,
    y_kind: str,
    n_targets: int | None,
) -> None:
    if nnz is not None and (len(feature_shape) != 1 or nnz < 0):
        raise DataError(
            f"{url}: CSR rows have one axis and at least 0 entries, not feature_shape {feature_shape} and "
            f"nnz={nnz}"
        )
    if y_kind not in schema.Y_KINDS:
        raise DataError(f"{url}: y_kind is {y_kind!r}, but it must be one of {schema.Y_KINDS}")
    if (y_kind == "labels") != (n_targets is None) or (n_targets is not None and n_targets < 1):
        raise DataError(
            f"{url}: y_kind {y_kind!r} with n_targets={n_targets}: targets and multi-labels have at least "
            "one column, labels have none"
        )
    if y_kind != "labels" and y_dtype is None:
        raise DataError(f"{url}: y_kind {y_kind!r} needs y_dtype, the type of its values")


def check_room(
    location: Location, overwrite: bool, *, unfinished: bool = False, resumable: bool = True
) -> None:
    """Refuse a location with other files, or with a dataset that may not be replaced; delete nothing."""
    if location.is_empty() or (format_name := format_of(location)) == REMOVED:
        return
    if format_name != schema.FORMAT:
        raise DataError(
            f"{location.url} exists and is not a scalelatent dataset, so it is not replaced; choose another "
            "output, or remove it yourself"
        )
    finished = _is_finished(location)
    if not (overwrite or (unfinished and not finished)):
        state = "exists" if finished else "exists (unfinished)"
        choose, replace = "choose another output", "replace it with --overwrite (overwrite=True)"
        if finished or not resumable:
            raise DataError(f"{location.url} {state}; {choose}, or {replace}")
        raise DataError(
            f"{location.url} {state}; {choose}, {replace}, or, if it was started with the same "
            "arguments, continue it with --resume (resume=True)"
        )
    path = location.local_path("")
    if path is not None and os.path.islink(path):
        raise DataError(
            f"{location.url} is a link to the dataset {os.path.realpath(path)}, which is not replaced "
            "through a link; give that folder as the output, or remove the link"
        )


def _is_finished(location: Location) -> bool:
    try:
        return read_attrs(location).complete
    except DataError:  # a dataset of a newer version, or a damaged one: it may be finished
        return True


def _check_resumed(
    location: Location,
    n_rows: int,
    attrs: DatasetAttrs,
    dtype: np.dtype,
    y_dtype: np.dtype | None,
    weighted: bool,
    layout: ChunkLayout | None,
) -> None:
    """Refuse to resume a dataset that was created with other arguments."""
    writer = ShardWriter(location)
    old = writer.attrs.provenance
    then = {"rows": writer.n_rows, "feature_shape": writer.attrs.feature_shape, "dtype": str(writer.dtype)}
    now = {"rows": n_rows, "feature_shape": attrs.feature_shape, "dtype": str(dtype)}
    then |= {"labels": str(writer.y_dtype), "weights": writer.weighted, "shard_rows": writer.shard_rows}
    now |= {"labels": str(y_dtype), "weights": weighted}
    for name in ("x_kind", "y_kind", "n_targets"):
        then[name], now[name] = getattr(writer.attrs, name), getattr(attrs, name)
    now["shard_rows"] = writer.shard_rows if layout is None else layout.shard_rows
    # The parameters determine the rows; the version of the software that created the dataset does not.
    then |= {k: v for k, v in old.items() if k not in ("scalelatent", "appended")}
    now |= {k: v for k, v in json.loads(json.dumps(attrs.provenance)).items() if k != "scalelatent"}
    differing = [
        f"{k} was {then.get(k)!r}, now {now.get(k)!r}" for k in then | now if then.get(k) != now.get(k)
    ]
    if differing:
        raise DataError(
            f"{location.url} was started with other arguments ({'; '.join(differing)}); resume with the "
            "same arguments, or start again with --overwrite"
        )


def create_like(
    ds: Dataset,
    url: str | os.PathLike[str],
    *,
    n_rows: int | None = None,
    nnz: int | None = None,
    provenance: dict[str, Any] | None = None,
    overwrite: bool = False,
    **changed: Any,
) -> ShardWriter:
    """Return the writer of a new dataset with the row shape, names, dtypes, classes and weights of `ds`."""
    check_not_own_input(url, ds.place)
    check_room(locate(url), overwrite, resumable=False)
    location = begin_dataset(
        url,
        ds.n_rows if n_rows is None else n_rows,
        ds.feature_shape,
        ds.dtype,
        nnz=ds.nnz if nnz is None else nnz,
        weighted=ds.has_weight,
        provenance=provenance,
        overwrite=overwrite,
        **{"feature_names": ds.feature_names, **ds.y_options(), **changed},
    )
    return ShardWriter(location)


def derive_provenance(ds: Dataset, action: str, **parameters: Any) -> dict[str, Any]:
    """Return the provenance of a dataset that is derived from `ds`."""
    origin = {"of": ds.attrs.get("provenance", {}), "content": ds.fingerprint()} if ds.attrs else {}
    return {"importer": action, **parameters, **origin}


@contextlib.contextmanager
def remove_on_failure(writer: ShardWriter) -> Iterator[None]:
    """Delete the dataset after any error, including Ctrl-C; use this only if `writer` is the only writer."""
    writer.next_step, writer.is_only_writer = "try again: the partial dataset is removed", True
    with clear_on_failure(locate(writer.url)):
        yield


def copy_rows(
    ds: Dataset,
    url: str | os.PathLike[str],
    *,
    provenance: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **layout: Unpack[LayoutOptions],
) -> None:
    """Write the rows of a dataset, with labels and weights, as a new dataset at `url`."""
    provenance = derive_provenance(ds, "save") if provenance is None else provenance
    writer = create_like(ds, url, provenance=provenance, overwrite=overwrite, **layout)
    with remove_on_failure(writer):
        bounds = map(writer.shard_bounds, range(writer.n_shards))
        write_shards(writer, (RowBatch.read(ds, a, b) for a, b in bounds), progress)
        writer.finish()


def link_dataset(ds: Dataset, location: Location) -> str:
    """Link or copy each file of a finished dataset to another location; return the fingerprint."""
    if ds.place is None or not ds.is_stored:
        raise DataError("rows in memory cannot be linked: write them with Dataset.save first")
    source = ds.place
    with explain_os_errors(location, f"copying {ds.url}"):
        here, there = source.local_path(""), location.local_path("")
        if here is not None and there is not None:
            shutil.copytree(here, there, copy_function=_link_or_copy, dirs_exist_ok=True)
        else:
            _copy_files(source, location, "")
    return ds.fingerprint()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or a disk without hard links
        shutil.copyfile(source, target)


def _copy_files(source: Location, target: Location, prefix: str) -> None:
    for name in source.keys(prefix):
        key = f"{prefix}/{name}" if prefix else name
        data = source.read(key) if source.has(key) else None
        if data is None:
            _copy_files(source, target, key)
        else:
            target.write(key, data)
