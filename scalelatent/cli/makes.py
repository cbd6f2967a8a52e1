"""``scalelatent data make``: datasets of any size, whose rows are functions of a seed and their number."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from scalelatent import data
from scalelatent.errors import JobError

from .data import describe_dataset, print_dataset
from .dataset_verbs import Call, dataset_verb
from .show import (
    Jobs,
    Json,
    Overwrite,
    VerbGroup,
    parse_image_size,
    parse_row_range,
    print_json,
    with_options,
)

if TYPE_CHECKING:
    from scalelatent.data import Dataset

app = VerbGroup(help="Make datasets of any size.")

BaseRows = Annotated[
    str | None, typer.Option(metavar="START:STOP", help="Rows of the base to use; all by default.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example digits.zarr.")]


class MakeFlags(NamedTuple):
    """Options of all ``data make`` commands: how the dataset is written and reported."""

    n_jobs: Jobs = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted command.")] = False
    overwrite: Overwrite = False
    json: Json = False

    def options(self) -> dict[str, Any]:
        """Return the arguments of all functions that make datasets."""
        return {"n_jobs": self.n_jobs, "resume": self.resume, "overwrite": self.overwrite}


def _report_pair(datasets: tuple[Dataset, Dataset], json: bool) -> None:
    """Print the corrupted and the clean dataset."""
    corrupted, clean = datasets
    if json:
        print_json({**describe_dataset(corrupted), "target": describe_dataset(clean)})
    else:
        print_dataset(corrupted, False)
        print_dataset(clean, False)


verb = functools.partial(dataset_verb, app, MakeFlags, "making", print_dataset, has_kernels=True)
corrupting_verb = functools.partial(dataset_verb, app, MakeFlags, "making", _report_pair, has_kernels=True)


@verb("digits")
def make_digits(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="Number of images.")],
    base: Annotated[
        str, typer.Option(help="A dataset of images to vary, such as MNIST; or scikit-learn's digits.")
    ] = "digits",
    base_rows: BaseRows = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="Index of the first image; by default the originals come first.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the deformations.")] = 0,
    alpha: Annotated[float, typer.Option(help="Strength of the deformation.")] = 1.0,
) -> Call:
    """Make any number of digits.

    Each image is an image of the base with a small deformation, which only its index decides.
    """
    used = _row_range(base_rows)
    return functools.partial(
        data.make_digits, out, rows, base=base, base_rows=used, start=start, seed=seed, alpha=alpha
    )


@verb("documents")
def make_documents(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="Number of documents.")],
    base: Annotated[str, typer.Option(help="A dataset of sparse word counts to draw from.")],
    base_rows: BaseRows = None,
    start: Annotated[int, typer.Option(min=0, help="Index of the first document.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
) -> Call:
    """Make any number of documents.

    Each document has the length of a document of the base, and words drawn from it, which only its index
    decides. Labels are those of the base.
    """
    used = _row_range(base_rows)
    return functools.partial(
        data.make_documents, out, rows, base=base, base_rows=used, start=start, seed=seed
    )


def _row_range(rows: str | None) -> tuple[int, int] | None:
    """Return (start, stop) of the option --base-rows."""
    if rows is None:
        return None
    run = parse_row_range(rows, "--base-rows")
    if run.stop is None or run.stop < 0 or (run.start or 0) < 0:
        raise JobError(
            f'--base-rows {rows}: both ends must count from the first row; write for example "0:50000"'
        )
    return run.start or 0, run.stop


NImages = Annotated[int, typer.Option(min=1, help="Number of images.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same images.")]
Noise = Annotated[float | None, typer.Option(min=0, max=1, help="Probability that a pixel is flipped.")]
Size = Annotated[str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Size of an image, in pixels.")]


@verb("bars")
def make_bars(
    out: Out,
    rows: NImages,
    crosses: Annotated[int | None, typer.Option(min=1, help="Crossings on each side of an image; 5.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Length of a bar, in pixels; 5.")] = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> Call:
    """Make images of two bars that cross in all ways."""
    return functools.partial(
        data.make_images, out, "bars", rows, seed=seed, noise=noise, crosses=crosses, length=length
    )


@verb("symbols")
def make_symbols(
    out: Out,
    rows: NImages,
    count: Annotated[int | None, typer.Option(min=1, help="Symbols in an image; 16.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> Call:
    """Make images of eight symbols at random places, 64x64 pixels by default."""
    options: dict[str, Any] = {"noise": noise, "count": count, "size": parse_image_size(size, "--size")}
    return functools.partial(data.make_images, out, "symbols", rows, seed=seed, **options)


@verb("letters")
def make_letters(
    out: Out,
    rows: NImages,
    count: Annotated[int | None, typer.Option(min=1, help="Letters in an image; 5.")] = None,
    alphabet: Annotated[str | None, typer.Option(help="Letters to draw; A to Z.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
) -> Call:
    """Make images of letters at random places, 24x24 pixels by default."""
    options: dict[str, Any] = {"noise": noise, "count": count, "size": parse_image_size(size, "--size")}
    return functools.partial(data.make_images, out, "letters", rows, seed=seed, alphabet=alphabet, **options)


@verb("text")
def make_text(out: Out, rows: NImages, size: Size = None, noise: Noise = None, seed: Seed = 0) -> Call:
    """Make pages of text, 72x128 pixels by default."""
    pixels = parse_image_size(size, "--size")
    return functools.partial(data.make_images, out, "text", rows, seed=seed, noise=noise, size=pixels)


@verb("traits")
def make_traits(
    out: Out,
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
) -> Call:
    """Make images of two traits: square or circle, and one of two diagonals."""
    options: dict[str, Any] = {"labels": labels, "together": together, "size": size, "gap": gap}
    options |= {"blur": blur, "grain": grain, "noise": noise}
    return functools.partial(data.make_images, out, "traits", rows, seed=seed, **options)


class CorruptionFlags(NamedTuple):
    """Options of every corruption: which images are corrupted, and where the clean images go."""

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

    def call(self, kind: str, out: str, **options: Any) -> Call:
        """Return the call of `make_corrupted`."""
        values = {**self._asdict(), "base_rows": _row_range(self.base_rows)}
        if values.pop("grey"):
            values["threshold"] = None
        return functools.partial(data.make_corrupted, out, kind, **values, **options)


with_corruption_flags = with_options("flags", CorruptionFlags)

Lines = Annotated[int, typer.Option(min=0, help="Number of lines.")]
Pixels = Annotated[str, typer.Option(metavar="HEIGHTxWIDTH", help="Size of the patch, in pixels.")]


@corrupting_verb("noisy-digits")
@with_corruption_flags
def make_noisy_digits(
    out: Out,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are flipped.")] = 0.1,
    *,
    flags: CorruptionFlags,
) -> Call:
    """Make binary images with flipped pixels, and the clean images as a second dataset."""
    return flags.call("noisy-digits", out, share=share)


@corrupting_verb("occluded-digits")
@with_corruption_flags
def make_occluded_digits(
    out: Out,
    patch: Pixels = "8x8",
    value: Annotated[int, typer.Option(min=0, max=1, help="Value of the pixels in the patch.")] = 0,
    *,
    flags: CorruptionFlags,
) -> Call:
    """Make binary images with a covered patch, and the clean images as a second dataset."""
    return flags.call("occluded-digits", out, patch=parse_image_size(patch, "--patch"), value=value)


@corrupting_verb("bordered-digits")
@with_corruption_flags
def make_bordered_digits(
    out: Out,
    width: Annotated[
        int, typer.Option(min=1, help="Maximum width of the border; each side draws its own width.")
    ] = 3,
    *,
    flags: CorruptionFlags,
) -> Call:
    """Make images with a border, and the clean images as a second dataset."""
    return flags.call("bordered-digits", out, width=width)


@corrupting_verb("patched-digits")
@with_corruption_flags
def make_patched_digits(out: Out, patch: Pixels = "8x8", *, flags: CorruptionFlags) -> Call:
    """Make images with a patch of random pixels, and the clean images as a second dataset."""
    return flags.call("patched-digits", out, patch=parse_image_size(patch, "--patch"))


@corrupting_verb("gridded-digits")
@with_corruption_flags
def make_gridded_digits(
    out: Out,
    pitch: Annotated[int, typer.Option(min=2, help="Pixels from one line to the next.")] = 7,
    *,
    flags: CorruptionFlags,
) -> Call:
    """Make images under a grid of lines, and the clean images as a second dataset."""
    return flags.call("gridded-digits", out, pitch=pitch)


@corrupting_verb("cluttered-digits")
@with_corruption_flags
def make_cluttered_digits(out: Out, lines: Lines = 3, *, flags: CorruptionFlags) -> Call:
    """Make images crossed by lines, and the clean images as a second dataset."""
    return flags.call("cluttered-digits", out, lines=lines)


@corrupting_verb("deleted-digits")
@with_corruption_flags
def make_deleted_digits(
    out: Out,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are off.")] = 0.1,
    lines: Lines = 3,
    *,
    flags: CorruptionFlags,
) -> Call:
    """Make images with rows, columns and pixels turned off, and the clean images as a second dataset."""
    return flags.call("deleted-digits", out, share=share, lines=lines)
