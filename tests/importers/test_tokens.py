"""RCV1-v2 as counts of stems, from small files in the format of LYRL2004."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from scalelatent.cli import app
from scalelatent.data import import_tokens, leaf_topics, open_dataset
from scalelatent.errors import DataError

# The codes of RCV1 (Lewis et al., 2004, appendix 1), and how many have none below them.
CODES = """
    C11 C12 C13 C14 C15 C151 C1511 C152 C16 C17 C171 C172 C173 C174 C18 C181 C182 C183 C21 C22 C23 C24 C31
    C311 C312 C313 C32 C33 C331 C34 C41 C411 C42 CCAT E11 E12 E121 E13 E131 E132 E14 E141 E142 E143 E21 E211
    E212 E31 E311 E312 E313 E41 E411 E51 E511 E512 E513 E61 E71 ECAT G15 G151 G152 G153 G154 G155 G156 G157
    G158 G159 GCAT GCRIM GDEF GDIP GDIS GENT GENV GFAS GHEA GJOB GMIL GOBIT GODD GPOL GPRO GREL GSCI GSPO
    GTOUR GVIO GVOTE GWEA GWELF M11 M12 M13 M131 M132 M14 M141 M142 M143 MCAT
""".split()  # noqa: SIM905  a list of 103 lines says less


def test_eighty_two_topics_are_leaves() -> None:
    assert len(CODES) == 103
    leaves = leaf_topics(CODES)
    assert len(leaves) == 82
    assert {"C1511", "C152", "C171", "E121", "GPOL", "M141"} <= set(leaves)
    assert not {"C15", "C151", "C17", "E12", "G15", "M14", "MCAT"} & set(leaves)


Documents = dict[int, list[str]]


def documents(first: int, n: int) -> Documents:
    rng = np.random.default_rng(first)
    words = np.array([f"stem{i}" for i in range(60)])
    share = 1 / np.arange(1, 61)
    return {
        first + i: rng.choice(words, rng.integers(1, 40), p=share / share.sum()).tolist() for i in range(n)
    }


def format_value(docs: Documents) -> str:
    parts = []
    for number, words in docs.items():
        lines = [" ".join(words[a : a + 7]) for a in range(0, len(words), 7)]
        parts.append("\n".join([f".I {number}", ".W", *lines, ""]))
    return "\n".join(parts) + "\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[list[Path], Path, Documents, dict[int, list[str]]]:
    """Write two token files, one packed, and packed topics; return the paths and the documents."""
    one, two = documents(100, 25), documents(500, 14)
    first, second = tmp_path / "lyrl2004_tokens_train.dat", tmp_path / "lyrl2004_tokens_test_pt0.dat.gz"
    first.write_text(format_value(one))
    second.write_bytes(gzip.compress(format_value(two).encode()))
    names = ["MCAT", "M14", "M141", "GPOL", "GCAT"]
    rng = np.random.default_rng(0)
    held = {number: [n for n in names if rng.random() < 0.4] or ["GCAT"] for number in one | two}
    lines = [f"{name} {number} 1" for name in names for number in held if name in held[number]]
    topics = tmp_path / "rcv1-v2.topics.qrels.gz"
    topics.write_bytes(gzip.compress("\n".join(lines).encode()))
    return [first, second], topics, one | two, held


def test_counts_of_frequent_stems_and_topics_are_written(files, tmp_path: Path) -> None:
    tokens, topics, docs, held = files
    ds = import_tokens(tokens, topics, tmp_path / "ds", stems=20, shard_rows=8)
    total = Counter(word for words in docs.values() for word in words)
    chosen = sorted(sorted(total, key=lambda stem: (-total[stem], stem))[:20])
    reported = ds.attrs["provenance"]
    assert (reported["stems"], reported["topics"]) == (chosen, ["GCAT", "GPOL", "M14", "M141", "MCAT"])
    assert reported["source"] == [*(file.name for file in tokens), topics.name]
    expected = [[words.count(stem) for stem in chosen] for words in docs.values()]
    assert (ds.is_sparse, ds.dtype, ds.y_kind) == (True, np.uint16, "multilabel")
    np.testing.assert_array_equal(ds.read_x(0, 39).toarray(), expected)
    wanted = [[name in own for name in reported["topics"]] for own in held.values()]
    np.testing.assert_array_equal(ds.read_y(0, 39).toarray(), wanted)


def test_the_verb_keeps_leaf_topics_only(files, tmp_path: Path) -> None:
    tokens, topics, docs, held = files
    out = tmp_path / "ds"
    how = [word for file in tokens for word in ("--tokens", str(file))]
    arguments = ["data", "import", "rcv1", str(out), *how, "--topics", str(topics)]
    done = CliRunner().invoke(app, [*arguments, "--stems", "10", "--leaf-topics", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"] == len(docs)
    ds = open_dataset(out)
    assert ds.attrs["provenance"]["topics"] == ["GPOL", "M141"]
    wanted = [["GPOL" in own, "M141" in own] for own in held.values()]
    np.testing.assert_array_equal(ds.read_y(0, 39).toarray(), wanted)
    assert not np.all(np.any(wanted, axis=1))  # Some documents have no topic and stay.
    assert ds.n_features == 10
    done = CliRunner().invoke(app, ["data", "import", "rcv1", str(tmp_path / "x"), *how])
    assert done.exit_code == 2
    assert "--tokens needs --topics FILE" in done.output


@pytest.fixture
def with_empty(files) -> tuple[list[Path], Path, Documents, dict[int, list[str]]]:
    """Add documents with only one rare stem: the first, some in the middle, and the last three."""
    tokens, topics, docs, held = files
    rare = {number: [f"rare{number}"] for number in (100, 107, 124, 511, 512, 513)}
    docs = {**docs, **rare}
    first, second = (
        format_value({number: docs[number] for number in some}) for some in (range(100, 125), range(500, 514))
    )
    tokens[0].write_text(first)
    tokens[1].write_bytes(gzip.compress(second.encode()))
    return tokens, topics, docs, held


@pytest.mark.parametrize("shuffle", [None, 3])
def test_documents_without_any_stem_are_excluded_with_their_topics(
    with_empty, tmp_path: Path, shuffle: int | None
) -> None:
    tokens, topics, docs, held = with_empty
    whole = import_tokens(tokens, topics, tmp_path / "all", stems=20)
    assert (len(whole), "left_out" in whole.attrs["provenance"]) == (39, False)
    out, how = tmp_path / "ds", [word for file in tokens for word in ("--tokens", str(file))]
    how += ["--topics", str(topics), "--stems", "20", "--drop-empty"]
    more = [] if shuffle is None else ["--shuffle", str(shuffle)]
    done = CliRunner().invoke(app, ["data", "import", "rcv1", str(out), *how, *more])
    assert done.exit_code == 0, done.output
    ds = open_dataset(out)
    reported = ds.attrs["provenance"]
    reported = reported if shuffle is None else reported["of"]
    chosen = reported["stems"]
    kept = [number for number, words in docs.items() if set(words) & set(chosen)]
    assert set(docs) - set(kept) >= {100, 107, 124, 511, 512, 513}
    assert (len(ds), reported["left_out"]) == (len(kept), len(docs) - len(kept))
    assert f"excluded {reported['left_out']} documents without any of the 20 stems" in done.output
    expected = {
        (
            *(docs[number].count(stem) for stem in chosen),
            *(name in held[number] for name in reported["topics"]),
        )
        for number in kept
    }
    got = np.hstack([part(0, len(ds)).toarray() for part in (ds.read_x, ds.read_y)]).tolist()
    assert {tuple(row) for row in got} == expected
    if shuffle is None:
        np.testing.assert_array_equal(
            ds.read_x(0, len(ds)).toarray(), [[docs[n].count(stem) for stem in chosen] for n in kept]
        )
    done = CliRunner().invoke(app, ["data", "import", "rcv1", str(tmp_path / "x"), "--drop-empty"])
    assert done.exit_code == 2
    assert "--drop-empty go with --tokens" in done.output


def test_files_that_change_during_the_import_are_refused(with_empty, tmp_path: Path, monkeypatch) -> None:
    from scalelatent.importers import tokens as module

    tokens, topics, _, _ = with_empty
    read, opened = module._read_documents, []

    def changing(path):
        opened.append(path)
        found = list(read(path))
        return iter(found[:5] if len(opened) > 4 else found)

    monkeypatch.setattr(module, "_read_documents", changing)
    with pytest.raises(DataError, match="changed while it was read"):
        import_tokens(tokens, topics, tmp_path / "out", stems=20, drop_empty=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("oil price\n", r"line 1: 'oil price' where \.I was expected"),
        (".I seven\n.W\noil\n", r"line 1: '\.I seven' where '\.I NUMBER' was expected"),
        (".I 99999999999999999999\n.W\noil\n", r"line 1: .* where '\.I NUMBER' was expected"),
        (".I 7\noil\n", r"line 2: 'oil' where \.W was expected"),
        (".I 7\n", r"'the end of the file' where \.W was expected"),
        ("\n", "holds no document"),
        (".I 8\n.W\noil gas\n", "has no topic of document 8"),
        (".I 7\n.W\noil oil\n", "2 stems are needed, but there are 1 different ones"),
    ],
)
def test_the_error_names_damaged_files_and_no_output_is_left(tmp_path: Path, text: str, message: str) -> None:
    tokens, topics = tmp_path / "tokens.dat", tmp_path / "topics"
    tokens.write_text(text)
    topics.write_text("GPOL 7 1\n")
    with pytest.raises(DataError, match=message):
        import_tokens([tokens], topics, tmp_path / "out", stems=2)
    assert not (tmp_path / "out").exists()


def test_truncated_and_missing_files_are_refused(files, tmp_path: Path) -> None:
    tokens, topics, _, _ = files
    tokens[1].write_bytes(tokens[1].read_bytes()[:-20])
    with pytest.raises(DataError, match=r"test_pt0\.dat\.gz is damaged after line"):
        import_tokens(tokens, topics, tmp_path / "out", stems=5)
    with pytest.raises(DataError, match=r"token file .*none does not exist"):
        import_tokens([tmp_path / "none"], topics, tmp_path / "out")
    with pytest.raises(DataError, match=r"topics .*none does not exist"):
        import_tokens(tokens, tmp_path / "none", tmp_path / "out")
    with pytest.raises(DataError, match="no token file was given"):
        import_tokens([], topics, tmp_path / "out")


def test_a_flipped_byte_in_a_packed_file_is_reported(files, tmp_path: Path) -> None:
    tokens, topics, _, _ = files
    sound, found = tokens[1].read_bytes(), set()
    for at in range(20, len(sound), 37):
        torn = bytearray(sound)
        torn[at] ^= 0xFF
        tokens[1].write_bytes(bytes(torn))
        with pytest.raises(DataError, match=r"test_pt0\.dat\.gz is damaged (at|after) line") as caught:
            import_tokens(tokens, topics, tmp_path / "out", stems=5)
        found.add(type(caught.value.__cause__))
    assert zlib.error in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MCAT 7 1\n\nGPOL 9000000000 1\n", r"line 3: 'GPOL 9000000000 1' .* of 0 to 2,147,483,647"),
        ("GPOL -7 1\n", r"line 1: 'GPOL -7 1' .* of 0 to 2,147,483,647"),
        ("GPOL seven 1\n", r"line 1: 'GPOL seven 1' where 'TOPIC DOCUMENT 1' was expected"),
        ("GPOL 7\n", r"line 1: 'GPOL 7' where 'TOPIC DOCUMENT 1' was expected"),
        ("G\xd6L 7 1\n", r"line 1: .* where 'TOPIC DOCUMENT 1' was expected"),
        ("", "holds no topic: lines are 'TOPIC DOCUMENT 1'"),
        ("\n \n", "holds no topic"),
    ],
)
def test_damaged_topics_name_their_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    tokens, topics = tmp_path / "tokens.dat", tmp_path / "rcv1.qrels"
    tokens.write_text(".I 7\n.W\noil gas\n")
    topics.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=rf"topics .*rcv1\.qrels .*{message}"):
        import_tokens([tokens], topics, tmp_path / "out", stems=2)
    assert not (tmp_path / "out").exists()
