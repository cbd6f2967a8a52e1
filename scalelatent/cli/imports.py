"""``scalelatent data import``: convert files of many formats to datasets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from scalelatent.errors import JobError

from .data import KeyOfLabels, KeyOfRows, print_dataset
from .dataset_verbs import dataset_verb
from .show import Json, Overwrite, VerbGroup, print_line, with_options

if TYPE_CHECKING:
    from scalelatent.data import Dataset

app = VerbGroup(help="Import rows from files into a dataset, block by block.")

Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example mnist.zarr.")]
File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="The file to read: a path, s3://bucket/key, gs://bucket/key"),
]
Table = Annotated[
    str,
    typer.Argument(
        metavar="FILE|FOLDER|GLOB",
        help="A file, a folder of files or a pattern with *; also s3://…, gs://…",
    ),
]


class ImportFlags(NamedTuple):
    """Options of all ``data import`` commands: shuffle the rows, replace a dataset, print JSON."""

    shuffle: Annotated[
        int | None,
        typer.Option(
            "--shuffle", metavar="SEED", min=0, help="Shuffle all rows; the seed decides the order."
        ),
    ] = None
    overwrite: Overwrite = False
    json: Json = False

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of all import functions: shuffle and overwrite."""
        return {"shuffle": self.shuffle, "overwrite": self.overwrite}


class TableFlags(NamedTuple):
    """Options that choose the columns of a table."""

    label: Annotated[str | None, typer.Option("--label", metavar="COL", help="Column of labels.")] = None
    weight: Annotated[str | None, typer.Option("--weight", metavar="COL", help="Column of row weights.")] = (
        None
    )
    features: Annotated[
        str | None,
        typer.Option("--features", metavar="A,B,…", help="Columns of a row; by default all others."),
    ] = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of functions that import tables."""
        names = self.features and [name.strip() for name in self.features.split(",")]
        return {"label": self.label, "weight": self.weight, "features": names}


class ImageFlags(NamedTuple):
    """Options for the size and the colours of images."""

    size: Annotated[
        str | None, typer.Option("--size", metavar="HxW", help="Resize all to this height and width.")
    ] = None
    crop: Annotated[
        bool, typer.Option("--crop", help="With --size: cut the middle out instead of stretching.")
    ] = False
    gray: Annotated[bool, typer.Option("--gray", help="Convert all images to gray.")] = False
    rgb: Annotated[bool, typer.Option("--rgb", help="Convert all images to colour.")] = False

    def options(self) -> dict[str, Any]:
        """Return the arguments of functions that import images."""
        if self.gray and self.rgb:
            raise JobError("--gray and --rgb exclude each other; give one of them")
        color = "gray" if self.gray else "rgb" if self.rgb else None
        return {"size": self.size, "crop": self.crop, "color": color}


Part = Annotated[str, typer.Option("--part", metavar="train|test", help="Part of the dataset.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        envvar="SCALELATENT_CACHE",
        help="Folder of downloads; the user's cache by default.",
    ),
]
Mirror = Annotated[
    str | None, typer.Option("--mirror", metavar="URL", help="A folder on a server that has the files.")
]

with_table_flags = with_options("table_flags", TableFlags)
with_image_flags = with_options("image_flags", ImageFlags)


def _report(dataset: Dataset, json: bool) -> None:
    """Print the dataset, and how many images or documents the importer skipped, if any."""
    provenance = dataset.attrs["provenance"]
    # A shuffled dataset records the provenance of the unshuffled rows under the key "of".
    provenance = provenance.get("of", provenance)
    skipped = provenance.get("skipped")
    if skipped and skipped["first"]:
        print_line(
            f"skipped {skipped['unreadable']} unreadable images and {skipped['unlike_first']} of another "
            f"size or kind; the first: {', '.join(skipped['first'])}"
        )
    print_dataset(dataset, json)


verb = functools.partial(dataset_verb, app, ImportFlags, "importing", _report)


@verb("idx", "import_idx")
def import_idx(
    images: Annotated[str, typer.Argument(metavar="IMAGES", help="IDX file of images, .gz or plain.")],
    labels: Annotated[str, typer.Argument(metavar="LABELS", help="IDX file of labels, .gz or plain.")],
    url: Out,
) -> None:
    """Import a pair of IDX files, the format of MNIST."""


@verb("npz", "import_npz")
def import_npz(file: File, url: Out, x: KeyOfRows = None, y: KeyOfLabels = None) -> None:
    """Import arrays of a NumPy .npz file."""


@verb("csr", "import_csr")
def import_csr(
    file: File,
    url: Out,
    csr_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="The rows are P_data, P_indices, P_indptr; by default P is empty, x or X."
        ),
    ] = None,
    values: Annotated[
        str | None, typer.Option(metavar="V", help="Use the values P_V instead of P_data.")
    ] = None,
    y: Annotated[
        str | None,
        typer.Option(help="Labels: a key, or a CSR prefix (multi-labels); by default y or Y."),
    ] = None,
) -> None:
    """Import sparse (CSR) rows of a .npz file, scipy's own or with arrays of any prefix."""


@verb("svmlight", "import_svmlight")
def import_svmlight(
    file: File,
    url: Out,
    zero_based: Annotated[
        bool | None,
        typer.Option("--zero-based/--one-based", help="Number of the first column; detected by default."),
    ] = None,
    features: Annotated[
        int | None, typer.Option(min=1, help="Number of columns; by default up to the highest in the file.")
    ] = None,
) -> dict[str, Any]:
    """Import svmlight (libsvm) text, plain or gzip, as sparse rows."""
    first = "auto" if zero_based is None else zero_based
    return {"file": file, "url": url, "zero_based": first, "n_features": features}


@verb("npy", "import_npy")
def import_npy(
    file: File,
    url: Out,
    y: Annotated[str | None, typer.Option("--y", metavar="FILE", help="A .npy file of labels.")] = None,
) -> None:
    """Import a NumPy .npy file of rows, and optionally one of labels."""


@verb("hdf5", "import_hdf5")
def import_hdf5(file: File, url: Out, x: KeyOfRows = None, y: KeyOfLabels = None) -> None:
    """Import arrays of an HDF5 file.

    Keys are paths if the file has groups: --x train/data --y train/target.
    """


@verb("mat", "import_mat")
def import_mat(
    file: File,
    url: Out,
    x: KeyOfRows = None,
    y: KeyOfLabels = None,
    rows_last: Annotated[
        bool, typer.Option("--rows-last", help="Rows are along the last axis, as in images h x w x n.")
    ] = False,
) -> None:
    """Import variables of a MATLAB file.

    Files of version 7.3 are streamed; variables of older files are read whole.
    """


@verb("parquet", "import_parquet")
@with_table_flags
@with_image_flags
def import_parquet(
    source: Table, url: Out, *, table_flags: TableFlags, image_flags: ImageFlags
) -> dict[str, Any]:
    """Import columns of Parquet files: numbers, or one column of images."""
    return {"source": source, "url": url, **table_flags.options(), **image_flags.options()}


@verb("csv", "import_csv")
@with_table_flags
def import_csv(source: Table, url: Out, *, table_flags: TableFlags) -> dict[str, Any]:
    """Import columns of CSV files with a header line, plain or compressed.

    Features are read as float64.
    """
    return {"source": source, "url": url, **table_flags.options()}


@verb("images", "import_images", unit="images")
@with_image_flags
def import_images(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder of image files, or of one folder per class.")
    ],
    url: Out,
    *,
    image_flags: ImageFlags,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="The names of folders are not classes.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count images that are unreadable or of another size.")
    ] = False,
) -> dict[str, Any]:
    """Import a folder of images; their classes are the names of their folders."""
    options = {"labels": not no_labels, "skip_bad": skip_bad, **image_flags.options()}
    return {"folder": folder, "url": url, **options}


@verb("digits", "import_named", name="digits")
def import_digits(url: Out) -> None:
    """Import scikit-learn's digits: 1,797 images 8 x 8; nothing is downloaded."""


@verb("mnist", "import_named", name="mnist")
def import_mnist(url: Out, part: Part = "train", cache: Cache = None, mirror: Mirror = None) -> None:
    """Import MNIST: downloaded once, checked, kept in a cache."""


@verb("fashion-mnist", "import_named", name="fashion-mnist")
def import_fashion_mnist(url: Out, part: Part = "train", cache: Cache = None, mirror: Mirror = None) -> None:
    """Import Fashion-MNIST: downloaded once, checked, kept in a cache."""
