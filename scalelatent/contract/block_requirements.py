"""Optional requirements of a reduction, row map or learner, which the engine reads before it makes blocks."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("y", "x")


@dataclass(frozen=True)
class Corruption:
    """Rule that makes the input rows of a model by random corruption of its target rows.

    The result depends only on (seed, stage, epoch, row).
    """

    kind: str  # 'flip' inverts random outputs; 'occlude' sets a patch at a random position to 0
    rate: float = 0.0  # 'flip': share of each row's outputs to invert; their number is rounded, not random
    size: tuple[int, int] = (0, 0)  # 'occlude': height and width of the patch, which is within the image
    shape: tuple[int, int] = (0, 0)  # 'occlude': height and width of the image in a row
    seed: int = 0
    stage: str = "corruption"  # name of the random stream: training and validation rows have different ones


@dataclass(frozen=True)
class Targets:
    """Source of ``Block.y`` for a learner that predicts v binary outputs of each row instead of one class.

    Blocks then have uint8 ``y`` (rows, v) of zeros and ones, which the engine checks while it reads them.

    Attributes
    ----------
    source : {'y', 'x'}
        'y' uses the outputs of the dataset. 'x' uses its rows as outputs; ``Block.x`` is then the uint8
        outputs after ``corruption``, or (rows, 0) without a corruption (an RBM without inputs).
    corruption : Corruption or None
        Corruption of the outputs into inputs; only for source 'x'.
    """

    source: str = "y"
    corruption: Corruption | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r} is not one of {', '.join(SOURCES)}")
        if self.corruption is not None and self.source != "x":
            raise ValueError(
                f"source={self.source!r} has inputs of its own, and a corruption makes inputs from outputs: "
                "set source='x', or corruption=None"
            )


@dataclass(frozen=True)
class BlockRequirements:
    """Requirements of a model for its blocks of rows, such as their number of rows; each is optional."""

    csr: bool = False  # keep the blocks of a CSR dataset as :class:`.CsrRows` instead of dense arrays
    targets: Targets | None = None  # read outputs instead of class codes
    labels: bool = False  # the row map is a :class:`~.learners.LabelMap`, which computes its output's labels
    block_rows: int | None = None  # rows of a block, unless the user sets another number for a reduction
    # The engine makes up to 16 leaves (groups of consecutive blocks whose statistics are merged in order) as
    # long as merging takes at most this share of the computing time, instead of 0.02.
    merge_share: float | None = None
    # Memory that a computation needs in addition to its block and statistic: (bytes per thread, bytes per row
    # of the block or chain). If it is None, `plan` estimates both numbers from the size of the statistic.
    scratch: tuple[int, int] | None = None
    # The label -1 marks a row without a class, unless -1 is one of the classes; its class code is -1.
    unlabelled: bool = False
    # The rows of the next block are copied to a GPU while it computes; ``backend.asarray`` returns the copy.
    # In a pass, ``Block.x`` may be on the GPU, which keeps rows between passes.
    reads_on_gpu: bool = False

    @property
    def form(self) -> tuple[bool, Targets | None, bool]:
        """Requirements that change the contents of blocks; learners with equal values share their blocks."""
        return self.csr, self.targets, self.unlabelled
