"""Where the files of public datasets lie, and what they have to be."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ORIGINS", "RemoteFile"]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a public dataset."""

    title: str
    """Its name."""
    checksum: str
    """What it has to be: algorithm and hexadecimal digits."""
    urls: tuple[str, ...]
    """Where it lies; asked in this order."""


def _pair(mirrors: tuple[str, ...], head: str, images: str, labels: str) -> tuple[RemoteFile, ...]:
    """Images and labels of a part."""
    names = (f"{head}-images-idx3-ubyte.gz", images), (f"{head}-labels-idx1-ubyte.gz", labels)
    return tuple(RemoteFile(name, checksum, tuple(m + name for m in mirrors)) for name, checksum in names)


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
_RCV1_TEST = (
    (5976069, "ed40f7e418d10484091b059703eeb95ae3199fe042891dcec4be6696b9968374"),
    (5976066, "87700668ae45d45d5ca1ef6ae9bd81ab0f5ec88cc95dcef9ae7838f727a13aa6"),
    (5976063, "48143ac703cbe33299f7ae9f4995db49a258690f60e5debbff8995c34841c7f5"),
    (5976060, "dfcb0d658311481523c6e6ca0c3f5a3e1d3d12cde5d7a8ce629a9006ec7dbb39"),
)
_RCV1_TRAIN = (5976057, "5468f656d0ba7a83afc7ad44841cf9a53048a5c083eedc005dcdb5cc768924ae")
_RCV1_TOPICS = (5976048, "2a98e5e5d8b770bded93afc8930d88299474317fe14181aee1466cc754d0d1c1")


def _rcv1(title: str, place: tuple[int, str]) -> RemoteFile:
    return RemoteFile(title, f"sha256:{place[1]}", (f"https://ndownloader.figshare.com/files/{place[0]}",))


def _rcv1_files() -> dict[str, tuple[RemoteFile, ...]]:
    """The topics of all stories, then the stories of a part."""
    topics = _rcv1("rcv1v2.topics.qrels.gz", _RCV1_TOPICS)
    test = (_rcv1(f"lyrl2004_vectors_test_pt{i}.dat.gz", place) for i, place in enumerate(_RCV1_TEST))
    return {
        "train": (topics, _rcv1("lyrl2004_vectors_train.dat.gz", _RCV1_TRAIN)),
        "test": (topics, *test),
    }


# Checksums: of MNIST taken from the original files, of Fashion-MNIST its authors', of RCV1 scikit-learn's.
ORIGINS: dict[str, dict[str, tuple[RemoteFile, ...]]] = {
    "mnist": {
        "train": _pair(
            _MNIST,
            "train",
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        "test": _pair(
            _MNIST,
            "t10k",
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    },
    "fashion-mnist": {
        "train": _pair(
            _FASHION,
            "train",
            "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "md5:25c81989df183df01b3e8a0aad5dffbe",
        ),
        "test": _pair(
            _FASHION,
            "t10k",
            "md5:bef4ecab320f06d8554ea6380940ec79",
            "md5:bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
    "rcv1": _rcv1_files(),
}
"""Name -> part -> its files."""
