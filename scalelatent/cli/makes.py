"""``scalelatent data make``: datasets of any size, whose rows depend only on a seed and the row number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from .data import describe_dataset, print_dataset
from .dataset_verbs import dataset_verb, parse_base_rows
from .show import Jobs, Json, Overwrite, VerbGroup, print_json

if TYPE_CHECKING:
    from scalelatent.data import Dataset

app = VerbGroup(help="Make datasets of any size.")

BaseRows = Annotated[
    str | None, typer.Option(metavar="START:STOP", help="Rows of the base to use; all by default.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example digits.zarr.")]
NImages = Annotated[int, typer.Option(min=1, help="Number of images.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same images.")]
Noise = Annotated[float | None, typer.Option(min=0, max=1, help="Probability that a pixel is flipped.")]
Size = Annotated[str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Size of an image, in pixels.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted command.")]


class MakeFlags(NamedTuple):
    """Options of ``data make`` commands that write one dataset: threads, resume, overwrite, JSON."""

    n_jobs: Jobs = None
    resume: Resume = False
    overwrite: Overwrite = False
    json: Json = False

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of all functions that make datasets."""
        return {"n_jobs": self.n_jobs, "resume": self.resume, "overwrite": self.overwrite}


class CorruptionFlags(NamedTuple):
    """Options of all corruptions: the base images, the location of the clean images, how to write both."""

    base: Annotated[
        str, typer.Option(help="A dataset of grey images, such as MNIST; or scikit-learn's digits.")
    ] = "digits"
    base_rows: BaseRows = None
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of images; by default one of each base image.")
    ] = None
    clean: Annotated[
        str | None, typer.Option(help="Where the clean images go; by default OUT with .clean in its name.")
    ] = None
    threshold: Annotated[int, typer.Option(min=0, max=255, help="A grey value above it becomes 1.")] = 127
    grey: Annotated[bool, typer.Option("--grey", help="Keep grey values; drawn pixels are 255.")] = False
    seed: Seed = 0
    n_jobs: Jobs = None
    resume: Resume = False
    overwrite: Overwrite = False
    json: Json = False

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `make_corrupted`."""
        values = {**self._asdict(), "base_rows": parse_base_rows(self.base_rows)}
        values["threshold"] = None if values.pop("grey") else self.threshold
        del values["json"]
        return values


def _report_pair(datasets: tuple[Dataset, Dataset], json: bool) -> None:
    """Print the corrupted and the clean dataset."""
    corrupted, clean = datasets
    if json:
        print_json({**describe_dataset(corrupted), "target": describe_dataset(clean)})
    else:
        print_dataset(corrupted, False)
        print_dataset(clean, False)


def verb(name: str, target: str, /, **fixed: str) -> Any:
    """Return a decorator that registers a command which makes one dataset; see `dataset_verb`."""
    return dataset_verb(app, MakeFlags, "making", print_dataset, name, target, has_kernels=True, **fixed)


def corruption(kind: str) -> Any:
    """Return a decorator that registers a command which makes corrupted and clean images."""
    return dataset_verb(
        app, CorruptionFlags, "making", _report_pair, kind, "make_corrupted", has_kernels=True, kind=kind
    )


@verb("digits", "make_digits")
def make_digits(
    url: Out,
    rows: NImages,
    base: Annotated[
        str, typer.Option(help="A dataset of images to vary, such as MNIST; or scikit-learn's digits.")
    ] = "digits",
    base_rows: BaseRows = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="Index of the first image; by default the originals come first.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the deformations.")] = 0,
    alpha: Annotated[float, typer.Option(help="Strength of the deformation.")] = 1.0,
) -> None:
    """Make any number of digits.

    Each image is an image of the base with a small deformation, which only its index decides.
    """


@verb("documents", "make_documents")
def make_documents(
    url: Out,
    rows: Annotated[int, typer.Option(min=1, help="Number of documents.")],
    base: Annotated[str, typer.Option(help="A dataset of sparse word counts to draw from.")],
    base_rows: BaseRows = None,
    start: Annotated[int, typer.Option(min=0, help="Index of the first document.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
) -> None:
    """Make any number of documents.

    Each document has the length of a document of the base, and words drawn from it, which only its index
    decides. Labels are those of the base.
    """


@verb("bars", "make_images", kind="bars")
def make_bars(
    url: Out,
    rows: NImages,
    crosses: Annotated[int | None, typer.Option(min=1, help="Crossings on each side of an image; 5.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Length of a bar, in pixels; 5.")] = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> None:
    """Make images of two bars that cross in all ways."""


@verb("symbols", "make_images", kind="symbols")
def make_symbols(
    url: Out,
    rows: NImages,
    count: Annotated[int | None, typer.Option(min=1, help="Symbols in an image; 16.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> None:
    """Make images of eight symbols at random places, 64x64 pixels by default."""


@verb("letters", "make_images", kind="letters")
def make_letters(
    url: Out,
    rows: NImages,
    count: Annotated[int | None, typer.Option(min=1, help="Letters in an image; 5.")] = None,
    alphabet: Annotated[str | None, typer.Option(help="Letters to draw; A to Z.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> None:
    """Make images of letters at random places, 24x24 pixels by default."""


@verb("text", "make_images", kind="text")
def make_text(url: Out, rows: NImages, size: Size = None, noise: Noise = None, seed: Seed = 0) -> None:
    """Make pages of text, 72x128 pixels by default."""


@verb("traits", "make_images", kind="traits")
def make_traits(
    url: Out,
    rows: NImages,
    labels: Annotated[str | None, typer.Option(help="category (2 classes) or pattern (4).")] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Both traits in the same place: harder.")
    ] = False,
    size: Annotated[
        int | None, typer.Option(min=5, help="Height and width of a trait, in pixels; 13.")
    ] = None,
    gap: Annotated[int | None, typer.Option(min=0, help="Pixels between the traits; 2.")] = None,
    blur: Annotated[
        int | None, typer.Option(min=0, help="Grey images, blurred N times over 3 x 3 pixels; 0.")
    ] = None,
    grain: Annotated[
        int | None, typer.Option(min=0, max=255, help="Grey images whose values change by up to N; 0.")
    ] = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> None:
    """Make images of two traits: square or circle, and one of two diagonals."""


Lines = Annotated[int, typer.Option(min=0, help="Number of lines.")]
Pixels = Annotated[str, typer.Option(metavar="HEIGHTxWIDTH", help="Size of the patch, in pixels.")]


@corruption("noisy-digits")
def make_noisy_digits(
    url: Out,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are flipped.")] = 0.1,
) -> None:
    """Make binary images with flipped pixels, and the clean images as a second dataset."""


@corruption("occluded-digits")
def make_occluded_digits(
    url: Out,
    patch: Pixels = "8x8",
    value: Annotated[int, typer.Option(min=0, max=1, help="Value of the pixels in the patch.")] = 0,
) -> None:
    """Make binary images with a covered patch, and the clean images as a second dataset."""


@corruption("bordered-digits")
def make_bordered_digits(
    url: Out,
    width: Annotated[
        int, typer.Option(min=1, help="Maximum width of the border; each side draws its own width.")
    ] = 3,
) -> None:
    """Make images with a border, and the clean images as a second dataset."""


@corruption("patched-digits")
def make_patched_digits(url: Out, patch: Pixels = "8x8") -> None:
    """Make images with a patch of random pixels, and the clean images as a second dataset."""


@corruption("gridded-digits")
def make_gridded_digits(
    url: Out, pitch: Annotated[int, typer.Option(min=2, help="Pixels from one line to the next.")] = 7
) -> None:
    """Make images under a grid of lines, and the clean images as a second dataset."""


@corruption("cluttered-digits")
def make_cluttered_digits(url: Out, lines: Lines = 3) -> None:
    """Make images crossed by lines, and the clean images as a second dataset."""


@corruption("deleted-digits")
def make_deleted_digits(
    url: Out,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are off.")] = 0.1,
    lines: Lines = 3,
) -> None:
    """Make images with rows, columns and pixels turned off, and the clean images as a second dataset."""
