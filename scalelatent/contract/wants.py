"""What a work may ask of the engine; the engine reads it before it makes blocks."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("y", "x")


@dataclass(frozen=True)
class Corruption:
    """Inputs made of outputs, new ones in each epoch: a pure function of (seed, stage, epoch, row)."""

    kind: str  # 'flip': exchange zeros and ones; 'occlude': set a patch of an image to 0, at a random place
    rate: float = 0.0  # of 'flip': share of the outputs of each row, exactly so many (rounded)
    # of 'occlude': height and width of the patch, which lies whole within the image
    size: tuple[int, int] = (0, 0)
    shape: tuple[int, int] = (0, 0)  # of 'occlude': height and width of the image that a row is
    seed: int = 0
    # what the random numbers are for: training and validation rows have streams of their own
    stage: str = "corruption"


@dataclass(frozen=True)
class Targets:
    """Where ``Block.y`` comes from, for a work that learns outputs (rows, v) instead of classes.

    Blocks then have uint8 ``y`` (rows, v) of zeros and ones, checked as they are read.

    Attributes
    ----------
    source : {'y', 'x'}
        The outputs of the dataset; or its rows themselves, and ``Block.x`` is then uint8 too: what
        ``corruption`` makes of the outputs, or (rows, 0) without one (an RBM without inputs).
    corruption : Corruption or None
        Of source 'x'.
    """

    source: str = "y"
    corruption: Corruption | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} is not one of {', '.join(SOURCES)}")
        if self.corruption is not None and self.source != "x":
            raise ValueError(
                "a corruption makes inputs of outputs, so rows have none of their own: source='x'"
            )


@dataclass(frozen=True)
class Wants:
    """Optional requests of a reduction, row map, set of rows or online learner: its attribute ``wants``."""

    # Blocks of a CSR dataset stay :class:`.CsrRows`; else each is made dense when its turn comes.
    csr: bool = False
    targets: Targets | None = None  # Outputs in place of class codes.
    # Of a row map: the labels of its output are not copied but made by its method ``labels``
    # (:class:`~.learners.LabelMap`).
    labels: bool = False
    # Of a reduction: rows of a block, where the user says none. Of a row map: rows of a block.
    block_rows: int | None = None
    # Of a reduction: what merging may cost of computing, above the usual 2 %, where rows would else make
    # fewer than 16 leaves.
    merge_share: float | None = None
    # Bytes that a thread needs beside its block and statistic, and those for each row of the block (of a
    # chain). A plan guesses from the statistic where nothing is said.
    scratch: tuple[int, int] | None = None
    # A label -1 that is none of the classes means that the row has none: its class code is -1. Elsewhere
    # -1 is a label like others.
    unlabelled: bool = False

    @property
    def form(self) -> tuple[bool, Targets | None, bool]:
        """What makes blocks of the same rows alike."""
        return self.csr, self.targets, self.unlabelled
