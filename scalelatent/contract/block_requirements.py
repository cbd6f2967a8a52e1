"""Optional requirements of a reduction, row map or learner, which the engine reads before it makes blocks."""

from __future__ import annotations

from dataclasses import dataclass

TARGET_SOURCES = ("y", "x")  # values of Targets.source


@dataclass(frozen=True)
class Corruption:
    """Rule that corrupts target rows (zeros and ones) at random; a model gets the corrupted rows as input.

    The result depends only on ``seed``, ``stage``, the epoch and the index of the row.
    """

    kind: str  # 'flip' inverts values at random positions; 'occlude' sets a random patch of an image to 0
    rate: float = 0.0  # 'flip': share of the values of a row to invert; each row has the same number
    size: tuple[int, int] = (0, 0)  # 'occlude': height and width of the patch, always inside the image
    shape: tuple[int, int] = (0, 0)  # 'occlude': height and width of the image that a row contains
    seed: int = 0
    stage: str = "corruption"  # name of the random stream; training and validation use different names


@dataclass(frozen=True)
class Targets:
    """Source of ``Block.y`` for a learner that predicts v binary outputs of each row instead of one class.

    Blocks then have uint8 ``y`` (rows, v) of zeros and ones, which the engine checks while it reads them.

    Attributes
    ----------
    source : {'y', 'x'}
        'y': the outputs are the targets of the dataset. 'x': the outputs are its rows, and ``Block.x`` is the
        uint8 copy of the outputs after ``corruption``, or empty, shape (rows, 0), without a corruption.
    corruption : Corruption or None
        Corruption of the outputs into inputs; only for source 'x'.
    """

    source: str = "y"
    corruption: Corruption | None = None

    def __post_init__(self) -> None:
        if self.source not in TARGET_SOURCES:
            raise ValueError(f"source={self.source!r} is not one of {', '.join(TARGET_SOURCES)}")
        if self.corruption is not None and self.source != "x":
            raise ValueError(
                f"source={self.source!r} has inputs of its own, and a corruption makes inputs from outputs: "
                "set source='x', or corruption=None"
            )


@dataclass(frozen=True)
class BlockRequirements:
    """Requirements of a model for its blocks of rows, such as their number of rows; each is optional."""

    csr: bool = False  # keep the blocks of a CSR dataset as :class:`.CsrRows` instead of dense arrays
    targets: Targets | None = None  # read binary outputs of each row instead of its class code
    labels: bool = False  # True for a :class:`~.learners.LabelMap`, a row map that also computes labels
    block_rows: int | None = None  # number of rows of a block, unless the user sets another number
    # Largest share of the computing time for merging the statistics of leaves (groups of consecutive blocks).
    # If it is set, the engine makes at most 16 leaves; if it is None, the share is 0.02.
    merge_share: float | None = None
    # Memory that a computation needs besides its rows and statistic: (bytes per thread, bytes per row). The
    # rows are those of a block, or of a chain (part of a minibatch). None: `plan` estimates both numbers.
    scratch: tuple[int, int] | None = None
    # True: a row with the label -1 has no class, and its class code in the block is -1. (If -1 is one of the
    # classes, it is a label like any other.)
    unlabelled: bool = False
    # True: the rows of the next block are copied to the GPU while it computes; ``backend.asarray`` returns
    # this copy. In a pass, ``Block.x`` may also be a GPU array that was kept from an earlier pass.
    reads_on_gpu: bool = False

    @property
    def form(self) -> tuple[bool, Targets | None, bool]:
        """Requirements that change what blocks contain; readers with equal values can share cached rows."""
        return self.csr, self.targets, self.unlabelled
