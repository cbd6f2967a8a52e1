"""``scalelatent data make``: rows without end."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

from scalelatent.errors import JobError

from .data import describe, tell
from .show import (
    Function,
    Jobs,
    Json,
    Overwrite,
    Verbs,
    emit,
    kernels_told,
    pixels_of,
    progress_bar,
    run_of,
    with_options,
)

app = Verbs(help="Make datasets of any size.")

BaseRows = Annotated[
    str | None, typer.Option(metavar="START:STOP", help="The rows of the base that are used; all by default.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example digits.zarr.")]


class Making(NamedTuple):
    """How rows are made, whatever they are."""

    n_jobs: Jobs = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a broken-off command stopped.")] = (
        False
    )
    overwrite: Overwrite = False
    json: Json = False

    def options(self) -> dict[str, Any]:
        """Of functions that make datasets."""
        return {"n_jobs": self.n_jobs, "resume": self.resume, "overwrite": self.overwrite}


def making_rows(function: Function) -> Function:
    """Decorator of verbs that make rows, by compiled kernels."""
    return with_options("making", Making)(kernels_told()(function))


@app.command("digits")
@making_rows
def make_digits(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="How many images.")],
    base: Annotated[
        str, typer.Option(help="A dataset to vary, such as MNIST; or scikit-learn's digits.")
    ] = "digits",
    base_rows: BaseRows = None,
    start: Annotated[
        int | None, typer.Option(min=0, help="Index of the first image; by default the originals come first.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the deformations.")] = 0,
    alpha: Annotated[float, typer.Option(help="Strength of the deformation.")] = 1.0,
    beta: Annotated[float, typer.Option(help="Strength of the thickening.")] = 0.0,
    shift: Annotated[bool, typer.Option("--shift", help="Also shift by up to one pixel.")] = False,
    *,
    making: Making,
) -> None:
    """Make digits without end.

    Every image is an image of the base, bent a little, in a way that its index alone decides.
    """
    from scalelatent.data import make_digits as run

    how: dict[str, Any] = {"seed": seed, "alpha": alpha, "beta": beta, "shift": shift}
    used = _pair(base_rows)
    with progress_bar("making digits") as progress:
        dataset = run(
            out, rows, base=base, base_rows=used, start=start, **how,
            progress=progress, **making.options(),
        )  # fmt: skip
    tell(dataset, making.json)


@app.command("documents")
@making_rows
def make_documents(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="How many documents.")],
    base: Annotated[str, typer.Option(help="A dataset of sparse word counts to draw from.")],
    base_rows: BaseRows = None,
    start: Annotated[int, typer.Option(min=0, help="Index of the first document.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    *,
    making: Making,
) -> None:
    """Make documents without end.

    Every document is as long as a document of the base and has words drawn from it, in a way that its index
    alone decides; labels are those of the base.
    """
    from scalelatent.data import make_documents as run

    used = _pair(base_rows)
    with progress_bar("making documents") as progress:
        dataset = run(
            out, rows, base=base, base_rows=used, start=start, seed=seed,
            progress=progress, **making.options(),
        )  # fmt: skip
    tell(dataset, making.json)


def _pair(rows: str | None) -> tuple[int, int] | None:
    if rows is None:
        return None
    run = run_of(rows, "--base-rows")
    if run.stop is None or run.stop < 0 or (run.start or 0) < 0:
        raise JobError(f'--base-rows {rows}: both ends count from the first row; write for example "0:50000"')
    return run.start or 0, run.stop


Images = Annotated[int, typer.Option(min=1, help="How many images.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed, the same images.")]
Noise = Annotated[float | None, typer.Option(min=0, max=1, help="Chance of a flipped pixel.")]
Size = Annotated[str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Of an image, in pixels.")]


@app.command("bars")
@making_rows
def make_bars(
    out: Out,
    rows: Images,
    crosses: Annotated[int | None, typer.Option(min=1, help="Crossings a side of an image; 5.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Of a bar, in pixels; 5.")] = None,
    noise: Noise = None,
    seed: Seed = 0,
    *,
    making: Making,
) -> None:
    """Make images of two bars that cross in all ways."""
    _make_images("bars", out, rows, seed, making,
                 noise=noise, crosses=crosses, length=length)  # fmt: skip


@app.command("symbols")
@making_rows
def make_symbols(
    out: Out,
    rows: Images,
    count: Annotated[int | None, typer.Option(min=1, help="Symbols in an image; 16.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
    *,
    making: Making,
) -> None:
    """Make images of eight symbols at random places, 64x64 pixels by default."""
    _make_images("symbols", out, rows, seed, making,
                 noise=noise, count=count, size=pixels_of(size, "--size"))  # fmt: skip


@app.command("letters")
@making_rows
def make_letters(
    out: Out,
    rows: Images,
    count: Annotated[int | None, typer.Option(min=1, help="Letters in an image; 5.")] = None,
    alphabet: Annotated[str | None, typer.Option(help="Which letters; A to Z.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
    *,
    making: Making,
) -> None:
    """Make images of letters at random places, 24x24 pixels by default."""
    _make_images("letters", out, rows, seed, making,
                 noise=noise, count=count, alphabet=alphabet, size=pixels_of(size, "--size"))  # fmt: skip


@app.command("text")
@making_rows
def make_text(
    out: Out,
    rows: Images,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
    *,
    making: Making,
) -> None:
    """Make pages of text, 72x128 pixels by default."""
    _make_images("text", out, rows, seed, making,
                 noise=noise, size=pixels_of(size, "--size"))  # fmt: skip


@app.command("traits")
@making_rows
def make_traits(
    out: Out,
    rows: Images,
    labels: Annotated[str | None, typer.Option(help="category (2 classes) or pattern (4).")] = None,
    together: Annotated[bool, typer.Option("--together", help="Both traits on one place: harder.")] = False,
    size: Annotated[int | None, typer.Option(min=5, help="Pixels of a trait, up and across; 13.")] = None,
    gap: Annotated[int | None, typer.Option(min=0, help="Pixels between the traits; 2.")] = None,
    blur: Annotated[
        int | None, typer.Option(min=0, help="Grey images, so often blurred over 3 x 3 pixels; 0.")
    ] = None,
    grain: Annotated[
        int | None, typer.Option(min=0, max=255, help="Grey images: values change by up to so much; 0.")
    ] = None,
    noise: Noise = None,
    seed: Seed = 0,
    *,
    making: Making,
) -> None:
    """Make images of two traits: square or circle, and one of two diagonals."""
    _make_images("traits", out, rows, seed, making, noise=noise, labels=labels, together=together,
                 size=size, gap=gap, blur=blur, grain=grain)  # fmt: skip


def _make_images(kind: str, out: str, rows: int, seed: int, making: Making, **options: Any) -> None:
    from scalelatent.data import make_images

    with progress_bar(f"making {kind}") as progress:
        dataset = make_images(out, kind, rows, seed=seed, progress=progress, **making.options(), **options)
    tell(dataset, making.json)


class Corrupting(NamedTuple):
    """Which images are corrupted, and where the clean ones go."""

    base: Annotated[
        str, typer.Option(help="A dataset of grey images, such as MNIST; or scikit-learn's digits.")
    ] = "digits"
    base_rows: BaseRows = None
    rows: Annotated[int | None, typer.Option(min=1, help="How many images; one of each base by default.")] = (
        None
    )
    clean: Annotated[
        str | None, typer.Option(help="Where the clean images go; by default OUT with .clean in its name.")
    ] = None
    threshold: Annotated[int, typer.Option(min=0, max=255, help="A grey value above it is 1.")] = 127
    grey: Annotated[bool, typer.Option("--grey", help="Keep grey values; 255 is what is drawn.")] = False
    seed: Seed = 0

    def options(self) -> dict[str, Any]:
        """Of `make_corrupted`."""
        values = {**self._asdict(), "base_rows": _pair(self.base_rows)}
        return {**values, "threshold": None} if values.pop("grey") else values


def corrupting_rows(function: Function) -> Function:
    """Decorator of verbs that corrupt rows."""
    return with_options("corrupting", Corrupting)(making_rows(function))


Pixels = Annotated[str, typer.Option(metavar="HEIGHTxWIDTH", help="Of the patch, in pixels.")]


@app.command("noisy-digits")
@corrupting_rows
def make_noisy_digits(
    out: Out,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are flipped.")] = 0.1,
    *,
    corrupting: Corrupting,
    making: Making,
) -> None:
    """Make binary images with flipped pixels, and the clean ones as a second dataset."""
    _make_corrupted("noisy-digits", out, corrupting, making, share=share)


@app.command("occluded-digits")
@corrupting_rows
def make_occluded_digits(
    out: Out,
    patch: Pixels = "8x8",
    value: Annotated[int, typer.Option(min=0, max=1, help="What the patch is set to.")] = 0,
    *,
    corrupting: Corrupting,
    making: Making,
) -> None:
    """Make binary images of which a patch is gone, and the whole ones as a second dataset."""
    size = pixels_of(patch, "--patch")
    _make_corrupted("occluded-digits", out, corrupting, making, patch=size, value=value)


@app.command("bordered-digits")
@corrupting_rows
def make_bordered_digits(
    out: Out,
    width: Annotated[int, typer.Option(min=1, help="Of the border, at most: each side draws its own.")] = 3,
    *,
    corrupting: Corrupting,
    making: Making,
) -> None:
    """Make images in a border, and the clean ones as a second dataset."""
    _make_corrupted("bordered-digits", out, corrupting, making, width=width)


@app.command("patched-digits")
@corrupting_rows
def make_patched_digits(out: Out, patch: Pixels = "8x8", *, corrupting: Corrupting, making: Making) -> None:
    """Make images with a patch of random pixels, and the clean ones as a second dataset."""
    _make_corrupted("patched-digits", out, corrupting, making, patch=pixels_of(patch, "--patch"))


@app.command("gridded-digits")
@corrupting_rows
def make_gridded_digits(
    out: Out,
    pitch: Annotated[int, typer.Option(min=2, help="Pixels from a line to the next.")] = 7,
    *,
    corrupting: Corrupting,
    making: Making,
) -> None:
    """Make images below a grid of lines, and the clean ones as a second dataset."""
    _make_corrupted("gridded-digits", out, corrupting, making, pitch=pitch)


Lines = Annotated[int, typer.Option(min=0, help="How many lines.")]


@app.command("cluttered-digits")
@corrupting_rows
def make_cluttered_digits(out: Out, lines: Lines = 3, *, corrupting: Corrupting, making: Making) -> None:
    """Make images with lines across them, and the clean ones as a second dataset."""
    _make_corrupted("cluttered-digits", out, corrupting, making, lines=lines)


@app.command("deleted-digits")
@corrupting_rows
def make_deleted_digits(
    out: Out,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are off.")] = 0.1,
    lines: Lines = 3,
    *,
    corrupting: Corrupting,
    making: Making,
) -> None:
    """Make images with rows, columns and pixels turned off, and the whole ones as a second dataset."""
    _make_corrupted("deleted-digits", out, corrupting, making, share=share, lines=lines)


def _make_corrupted(kind: str, out: str, corrupting: Corrupting, making: Making, **options: Any) -> None:
    from scalelatent.data import make_corrupted

    with progress_bar(f"making {kind}") as progress:
        corrupted, whole = make_corrupted(
            out, kind, progress=progress, **corrupting.options(), **making.options(), **options
        )
    if making.json:
        emit({**describe(corrupted), "target": describe(whole)})
    else:
        tell(corrupted, False)
        tell(whole, False)
