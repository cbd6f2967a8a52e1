"""``scalelatent data make``: rows without end."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from scalelatent.errors import JobError

from .data import describe, tell
from .show import Jobs, Json, Overwrite, emit, kernels_told, pixels_of, progress_bar, run_of, verb

app = typer.Typer(no_args_is_help=True, help="Make datasets of any size.")

Resume = Annotated[bool, typer.Option("--resume", help="Go on where a broken-off command stopped.")]
BaseRows = Annotated[
    str | None, typer.Option(metavar="START:STOP", help="The rows of the base that are used; all by default.")
]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The dataset to write, for example digits.zarr.")]


@app.command("digits")
@verb
@kernels_told()
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
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
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
            n_jobs=jobs, resume=resume, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    tell(dataset, json)


@app.command("documents")
@verb
@kernels_told()
def make_documents(
    out: Out,
    rows: Annotated[int, typer.Option(min=1, help="How many documents.")],
    base: Annotated[str, typer.Option(help="A dataset of sparse word counts to draw from.")],
    base_rows: BaseRows = None,
    start: Annotated[int, typer.Option(min=0, help="Index of the first document.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
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
            n_jobs=jobs, resume=resume, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    tell(dataset, json)


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
@verb
@kernels_told()
def make_bars(
    out: Out,
    rows: Images,
    crosses: Annotated[int | None, typer.Option(min=1, help="Crossings a side of an image; 5.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Of a bar, in pixels; 5.")] = None,
    noise: Noise = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make images of two bars that cross in all ways."""
    _make_images("bars", out, rows, seed, jobs, resume, overwrite, json,
                 noise=noise, crosses=crosses, length=length)  # fmt: skip


@app.command("symbols")
@verb
@kernels_told()
def make_symbols(
    out: Out,
    rows: Images,
    count: Annotated[int | None, typer.Option(min=1, help="Symbols in an image; 16.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make images of eight symbols at random places, 64x64 pixels by default."""
    _make_images("symbols", out, rows, seed, jobs, resume, overwrite, json,
                 noise=noise, count=count, size=pixels_of(size, "--size"))  # fmt: skip


@app.command("letters")
@verb
@kernels_told()
def make_letters(
    out: Out,
    rows: Images,
    count: Annotated[int | None, typer.Option(min=1, help="Letters in an image; 5.")] = None,
    alphabet: Annotated[str | None, typer.Option(help="Which letters; A to Z.")] = None,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make images of letters at random places, 24x24 pixels by default."""
    _make_images("letters", out, rows, seed, jobs, resume, overwrite, json,
                 noise=noise, count=count, alphabet=alphabet, size=pixels_of(size, "--size"))  # fmt: skip


@app.command("text")
@verb
@kernels_told()
def make_text(
    out: Out,
    rows: Images,
    size: Size = None,
    noise: Noise = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make pages of text, 72x128 pixels by default."""
    _make_images("text", out, rows, seed, jobs, resume, overwrite, json,
                 noise=noise, size=pixels_of(size, "--size"))  # fmt: skip


@app.command("traits")
@verb
@kernels_told()
def make_traits(
    out: Out,
    rows: Images,
    labels: Annotated[str | None, typer.Option(help="category (2 classes) or pattern (4).")] = None,
    together: Annotated[bool, typer.Option("--together", help="Both traits on one place: harder.")] = False,
    size: Annotated[int | None, typer.Option(min=5, help="Pixels of a trait, up and across; 13.")] = None,
    gap: Annotated[int | None, typer.Option(min=0, help="Pixels between the traits; 2.")] = None,
    noise: Noise = None,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make images of two traits: square or circle, and one of two diagonals."""
    _make_images("traits", out, rows, seed, jobs, resume, overwrite, json,
                 noise=noise, labels=labels, together=together, size=size, gap=gap)  # fmt: skip


def _make_images(
    kind: str, out: str, rows: int, seed: int, jobs: int | None, resume: bool, overwrite: bool, json: bool,
    **options: Any,
) -> None:  # fmt: skip
    from scalelatent.data import make_images

    how: dict[str, Any] = {"seed": seed, "n_jobs": jobs, "resume": resume, "overwrite": overwrite}
    with progress_bar(f"making {kind}") as progress:
        dataset = make_images(out, kind, rows, progress=progress, **how, **options)
    tell(dataset, json)


Base = Annotated[str, typer.Option(help="A dataset of grey images, such as MNIST; or scikit-learn's digits.")]
SomeImages = Annotated[int | None, typer.Option(min=1, help="How many images; one of each base by default.")]
Clean = Annotated[
    str | None, typer.Option(help="Where the clean images go; by default OUT with .clean in its name.")
]
Threshold = Annotated[int, typer.Option(min=0, max=255, help="A grey value above it is 1.")]


@app.command("noisy-digits")
@verb
@kernels_told()
def make_noisy_digits(
    out: Out,
    base: Base = "digits",
    base_rows: BaseRows = None,
    rows: SomeImages = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the pixels that are flipped.")] = 0.1,
    clean: Clean = None,
    threshold: Threshold = 127,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make binary images with flipped pixels, and the clean ones as a second dataset."""
    _make_corrupted("noisy-digits", out, base, base_rows, rows, clean, threshold, seed, jobs, resume,
                    overwrite, json, share=share)  # fmt: skip


@app.command("occluded-digits")
@verb
@kernels_told()
def make_occluded_digits(
    out: Out,
    base: Base = "digits",
    base_rows: BaseRows = None,
    rows: SomeImages = None,
    patch: Annotated[str, typer.Option(metavar="HEIGHTxWIDTH", help="Of the patch, in pixels.")] = "8x8",
    value: Annotated[int, typer.Option(min=0, max=1, help="What the patch is set to.")] = 0,
    clean: Clean = None,
    threshold: Threshold = 127,
    seed: Seed = 0,
    jobs: Jobs = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Make binary images of which a patch is gone, and the whole ones as a second dataset."""
    _make_corrupted("occluded-digits", out, base, base_rows, rows, clean, threshold, seed, jobs, resume,
                    overwrite, json, patch=pixels_of(patch, "--patch"), value=value)  # fmt: skip


def _make_corrupted(
    kind: str, out: str, base: str, base_rows: str | None, rows: int | None, clean: str | None,
    threshold: int, seed: int, jobs: int | None, resume: bool, overwrite: bool, json: bool, **options: Any,
) -> None:  # fmt: skip
    from scalelatent.data import make_corrupted

    how: dict[str, Any] = {"seed": seed, "n_jobs": jobs, "resume": resume, "overwrite": overwrite}
    with progress_bar(f"making {kind}") as progress:
        corrupted, whole = make_corrupted(
            out, kind, base=base, base_rows=_pair(base_rows), rows=rows, clean=clean, threshold=threshold,
            progress=progress, **how, **options,
        )  # fmt: skip
    if json:
        emit({**describe(corrupted), "target": describe(whole)})
    else:
        tell(corrupted, json)
        tell(whole, json)
