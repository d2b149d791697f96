"""Corpora and batches: pure functions of their arguments; a folder is whole or does not exist.
Wrong input of the command line is in test_cli.py."""

import bz2
import gzip
import hashlib
import json
import lzma
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from tiktoken_ext import openai_public

import data
import train
from config import UserError, explain, parse
from plumbing import text, tokenizer
from ranks import ROOT


def batch(corpus, step=0, micro=0, rank=0, world=1, size=2, accum=1, T=8, seed=1):
    return data.Batches(corpus, T, size, accum, rank, world, seed).train(step, micro)


def test_batch_is_a_pure_function_and_the_global_batch_does_not_depend_on_the_mesh(corpus):
    assert torch.equal(batch(corpus)[0], batch(corpus)[0])
    for other in dict(step=1), dict(seed=2), dict(rank=1, world=2), dict(micro=1, accum=2):
        assert not torch.equal(batch(corpus, **other)[0], batch(corpus)[0])
    alone = torch.cat([batch(corpus, micro=m, accum=4, size=2)[0] for m in range(4)])
    ranks = torch.cat([batch(corpus, rank=r, world=4, size=2)[0] for r in range(4)])
    assert torch.equal(alone, ranks) and torch.equal(alone, batch(corpus, size=8)[0])
    inputs, targets = batch(corpus)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_training_never_reads_validation_tokens_and_reads_all_others():
    tokens = data.TokenFiles([np.arange(1000, dtype=np.uint16)], ["tokens.bin"])
    corpus = data.Corpus(tokens, 900, "byte", 1000, 1.0, "")
    seen = torch.cat(batch(corpus, size=12800))
    assert seen.min() == 0 and seen.max() == 899
    parts = [torch.cat(both) for *both, _ in data.Batches(corpus, 8, 4).validation(1)]
    assert torch.cat(parts).min() == 900 and torch.cat(parts).max() == 999


def own_documents(lengths, replicas, block_size=4):
    """Of each replica: the documents that its windows reach. Document d has tokens d, d, ... and an
    end of text."""
    texts = [[d] * (length - 1) + [256] for d, length in enumerate(lengths)]
    array = np.concatenate([*texts, [0] * 50]).astype(np.uint16)
    tokens = data.TokenFiles([array], ["test"])
    corpus = data.Corpus(tokens, sum(lengths), "byte", 257, 1.0, "")
    corpus = corpus.by_replica(replicas, block_size)
    found = []
    for rank in range(0, 2 * replicas, 2):
        seen = set()
        for each in rank, rank + 1:  # two shards
            batches = data.Batches(corpus, block_size, 50, 1, each, 2 * replicas)
            for step in range(20):
                seen |= set(torch.cat(batches.train(step)).unique().tolist())
        found.append(seen - {256})
    return found


def test_replicas_with_own_documents_share_none_and_miss_none():
    assert own_documents([40] * 8, 4) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
    assert own_documents([100, 50, 50, 50, 50], 3) == [{0}, {1, 2}, {3, 4}]
    assert own_documents([40], 1) == [{0}]


def test_too_few_documents_for_the_replicas_or_none_known_are_refused():
    with pytest.raises(UserError, match="too few documents for 3 replicas"):
        own_documents([200, 20], 3)
    tokens = data.TokenFiles([np.zeros(100, np.uint16)], ["test"])
    corpus = data.Corpus(tokens, 90, "unknown", 257, 1.0, "")
    with pytest.raises(UserError, match="do not tell where a document ends"):
        corpus.by_replica(2, 4)


def validation_windows(corpus, world, size):
    counted = []
    batches = []
    for rank in range(world):
        own = data.Batches(corpus, 8, size, rank=rank, world_size=world)
        parts = list(own.validation(2))
        batches.append(len(parts))
        counted += [row.tolist() for inputs, _, rows in parts for row in inputs[:rows]]
    assert len(set(batches)) == 1  # a sharded forward is a collective
    return counted


def test_validation_windows_are_the_same_for_any_split(corpus):
    windows = validation_windows(corpus, 1, 16)
    assert len(windows) == 2 * data.VALIDATION_ROWS
    for world, size in (1, 4), (3, 4), (5, 2), (40, 1):
        assert windows == validation_windows(corpus, world, size)


def test_builtin_corpus_is_megabytes_of_python_split_by_file():
    corpus = data.load(None)
    (tokens,) = corpus.tokens.arrays
    assert len(tokens) > 4e6 and corpus.vocab_size == 257 > tokens.max()
    assert 0.85 < corpus.train_tokens / len(corpus.tokens) < 0.99
    assert tokens[corpus.train_tokens - 1] == 256  # a document ends there
    assert corpus.hash == data.load(None).hash
    assert b"import " in tokens[corpus.train_tokens :].astype(np.uint8).tobytes()


def test_builtin_corpus_has_the_files_of_the_library_in_order_without_tests(tmp_path, monkeypatch):
    for name in "b.py", "a/c.py", "a/test/d.py", "site-packages/e.py", "f.txt":
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "broken.py").symlink_to("nowhere")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: tmp_path)
    assert ids(data.load(None)) == [*b"a/c.py\n", 256, *b"b.py\n", 256]


def ids(corpus) -> list:
    return corpus.tokens[np.arange(len(corpus.tokens))].tolist()


def test_written_corpus_holds_every_document(tmp_path, monkeypatch, capsys):
    text = "naïve\r\n\tπ 🙂 <|endoftext|>" + "x" * 1000
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second"}\n{"text": ""}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", "data.py --input a.txt b.jsonl --out out".split())
    data.main()
    expected = [*text.encode(), 256, *b"first", 256, *b"second", 256]
    count = len(expected)
    corpus = data.load("out")
    assert ids(corpus) == expected
    assert corpus.train_tokens == int(count * 0.95)
    assert corpus.bytes_per_token == pytest.approx((count - 3) / count)
    assert f"out: {count:,} tokens (byte)" in capsys.readouterr().out


def test_hash_of_a_written_corpus_is_that_of_its_tokens(tmp_path):
    hashes = set()
    for word in "xx", "yx", "xy":  # of the same length
        data.write_corpus([(word, True)], "byte", tmp_path / word, np.inf)
        written = (tmp_path / word / "tokens.bin").read_bytes()
        found = data.load(str(tmp_path / word)).hash
        assert found == hashlib.sha256(written).hexdigest()[:16]
        hashes.add(found)
    assert len(hashes) == 3


def test_writing_stops_at_max_tokens(tmp_path):
    out = str(tmp_path / "new" / "cut")
    documents = (("x" * 3, i % 3 == 2) for i in range(1200))  # three pieces each
    meta = data.write_corpus(documents, "byte", out, max_tokens=25)
    assert (meta["tokens"], meta["bytes_per_token"]) == (25, 24 / 26)
    assert ids(data.load(out)) == ([120] * 9 + [256]) * 2 + [120] * 5


def test_documents_do_not_depend_on_the_spelling_of_the_suffix_and_on_a_bom(tmp_path):
    mark = b"\xef\xbb\xbf"
    line = b'{"text": "a\xef\xbb\xbfb"}\n'  # in the text it counts
    for name in "a.jsonl", "a.JSONL", "a.ndjson", "a.NDJson":
        (tmp_path / name).write_bytes(mark + line + line)
        documents = list(data.text_documents([tmp_path / name]))
        assert documents == [("a\ufeffb", True)] * 2
    whole = b"x" * 2**20 + b"\r\n"
    (tmp_path / "a.TXT").write_bytes(mark + whole * 2 + mark)  # many pieces
    *pieces, (last, ends) = data.text_documents([tmp_path / "a.TXT"])
    assert len(pieces) > 3 and not any(ends for _, ends in pieces)
    assert (last, ends) == ("", True)
    assert "".join(text for text, _ in pieces).encode() == whole * 2 + mark


def test_packed_files_have_the_documents_of_the_files_in_them(tmp_path):
    contents = {"a.txt": "naïve\r\n" * 300_000, "a.jsonl": '{"text": "first"}\n\n{"text": "π"}\n'}
    for name, content in contents.items():
        plain = tmp_path / name
        plain.write_bytes(content.encode())
        expected = list(data.text_documents([plain]))
        half = len(content) // 2
        for suffix in ".gz", ".GZ":
            packed = tmp_path / (name + suffix)
            # in two parts, as `cat a.gz b.gz` makes it
            packed.write_bytes(b"".join(
                gzip.compress(part.encode()) for part in (content[:half], content[half:])
            ))
            assert list(data.text_documents([packed])) == expected


def damaged_files(folder) -> dict:
    """Path -> what its line says."""
    whole = gzip.compress(b'{"text": "word"}\n' * 1000)
    changed = bytearray(whole)
    changed[-8] ^= 1  # its checksum
    contents = {
        "cut.jsonl.gz": (whole[:-9], "ended before the end-of-stream marker"),
        "cut.txt.gz": (whole[: len(whole) // 2], "ended before the end-of-stream marker"),
        "changed.txt.gz": (bytes(changed), "CRC check failed"),
        "plain.txt.gz": (b"word", "Not a gzipped file"),
        "latin.txt.gz": (gzip.compress("é".encode("latin1")), "codec can't decode"),
        "array.json.gz": (gzip.compress(b"[]"), "neither text nor .jsonl"),
        "archive.tar.gz": (gzip.compress(bytes(1024)), "neither text nor .jsonl"),
        "number.jsonl.gz": (gzip.compress(b'{"text": "a"}\n{"text": 5}\n'), "line 2 is not a JSON"),
    }
    found = {}
    for name, (content, message) in contents.items():
        (folder / name).write_bytes(content)
        found[folder / name] = message
    return found


def check_refused(path, message, monkeypatch):
    """data.py has one line for it that names it, exit code 2, and leaves no folder."""
    out = path.parent / "new" / "corpus"
    monkeypatch.setattr(sys, "argv", ["data.py", "--input", str(path), "--out", str(out)])
    with pytest.raises(Exception) as error:
        data.main()
    code, line = explain(error.value)
    assert code == 2
    assert message in line or re.search(message, line), line
    assert len(line.splitlines()) == 1
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_damaged_packed_files_are_refused_in_one_line_and_leave_nothing(tmp_path, monkeypatch):
    for path, message in damaged_files(tmp_path).items():
        check_refused(path, message, monkeypatch)
        check_refused(path, str(path), monkeypatch)


def test_missing_package_is_named(tmp_path, monkeypatch):
    """On a machine without pyarrow."""

    class Hidden:
        def find_spec(name, path, target=None):
            if name.split(".")[0] == "pyarrow":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in list(sys.modules):
        if name.split(".")[0] == "pyarrow":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    for name in "a.parquet", "a.txt.zst", "a.jsonl.zst":
        (tmp_path / name).touch()
        message = "this needs a package: pip install pyarrow"
        check_refused(tmp_path / name, message, monkeypatch)


LINES = b'{"text": "ab", "content": "x"}\n\n{"text": null}\n{"text": ""}\n{"text": "c"}\n'
DOCUMENTS = [*b"ab", 256, *b"c", 256]
PROSE = [*b"{ab}\n", 256]
TEXTS_OF_OTHERS = {  # name -> (content, tokens or what the line says)
    **{name: (LINES, DOCUMENTS) for name in (
        "a.jsonl", "a.jsonlines", "a.jl", "a.jsonl.1", "part-00000", "a.json", "a.txt", "a",
    )},
    "a.json.gz": (gzip.compress(LINES), DOCUMENTS),
    "a.jsonl.gz": (gzip.compress(LINES), DOCUMENTS),
    "part-00001": (gzip.compress(LINES), DOCUMENTS),
    "bom.jl": (b"\xef\xbb\xbf \n" + LINES, DOCUMENTS),
    "b.txt": (b"{ab}\n", PROSE),
    "b.txt.gz": (gzip.compress(b"{ab}\n"), PROSE),
    "b.md": (b"[a](b)", [*b"[a](b)", 256]),
    "b.jsonl": (b"{ab}\n", "line 1 is not a JSON object"),
    "prose.jsonlines.2": (b"word", "line 1 is not a JSON object"),
    "prose.ndjson": (b"word", "line 1 is not a JSON object"),
    "julia.jl": (b"x = 1\n", [*b"x = 1\n", 256]),
    "empty.txt": (b"", "the input has no text"),
    "mark.txt": (b"\xef\xbb\xbf", "the input has no text"),
    "cut": (b'{"text": "a', "line 1 is not a JSON object"),
    "several.json": (b'{\n "text": "a"\n}\n', "line 1 is not a JSON object"),
    "array.json": (b'["a"]', "jq -c"),
    "array.txt": (b' [{"text": "a"}]', "jq -c"),
    "other.jsonl": (b'{"content": "x", "id": 1}', "--field one of content, id"),
    "number.jsonl": (b'{"text": 1}', "line 1 is not a JSON object with a string"),
    "nulls.jsonl": (b'{"text": null}', "no text"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}', "line 2: .*iconv -f latin1"),
    "latin.txt": (b"\xe9", "codec can't decode.*iconv -f latin1"),
    "wide.txt": ("word".encode("utf-16"), "iconv -f UTF-16"),
    "wide-le.txt": ("word".encode("utf-16-le"), "bytes that are zero"),
    "c.bz2": (bz2.compress(b"word"), "but bz2"),
    "c.txt": (lzma.compress(b"word"), "but xz"),
    "c.zip": (b"PK\x03\x04word", "but zip"),
    "c.tar": (bytes(257) + b"ustar" + bytes(300), "but tar"),
    "wide-le.jsonl": (LINES.decode().encode("utf-16-le"), "bytes that are zero.*iconv -f UTF-16LE"),
    "c.lz4": (b"\x04\x22\x4d\x18word", "but lz4"),
    "c.json-seq": (b'\x1e{"text": "a"}\n\x1e{"text": "b"}\n', "json-seq: .*tr -d .*036. . jq -c"),
    "c.npy": (b"\x93NUMPYword", "but npy"),
    "zeros": (b"word\0word", "bytes that are zero"),
    "named.gz": (b"word", "Not a gzipped file"),
    "packed.parquet.gz": (gzip.compress(b"PAR1"), "unpack it first"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS_OF_OTHERS)
def test_texts_of_other_programs_are_read_right_or_refused_in_one_line(
    tmp_path, monkeypatch, name
):
    content, expected = TEXTS_OF_OTHERS[name]
    (tmp_path / name).write_bytes(content)
    if isinstance(expected, str):
        check_refused(tmp_path / name, expected, monkeypatch)
        return
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", f"data.py --input {tmp_path / name} --out {out}".split())
    data.main()
    assert ids(data.load(str(out))) == expected


def test_empty_file_is_no_document(tmp_path):
    for name, content in ("a.txt", "a"), ("empty.txt", ""), ("b.txt", "b"):
        (tmp_path / name).write_text(content)
    paths = [tmp_path / name for name in ("a.txt", "empty.txt", "b.txt")]
    assert list(data.text_documents(paths)) == [("a", False), ("", True), ("b", False), ("", True)]


def test_another_field_than_text_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "a.jl").write_bytes(LINES.splitlines()[0])
    monkeypatch.chdir(tmp_path)
    argv = "data.py --input a.jl --field content --out out".split()
    monkeypatch.setattr(sys, "argv", argv)
    data.main()
    assert ids(data.load("out")) == [ord("x"), 256]


def test_pieces_of_a_text_end_with_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{'word ' * (i % 7)}{i}\n" for i in range(20_000)))
    pieces = [piece for piece, _ in data.text_documents([path])]
    assert len(pieces) > 4 and all(piece.endswith("\n") for piece in pieces[:-1])


def split(folder, words) -> tuple:
    """The documents (texts) of both parts of a corpus that has these."""
    data.write_corpus([(word, True) for word in words], "byte", folder, np.inf)
    corpus = data.load(str(folder))
    tokens = bytes(min(token, 255) for token in ids(corpus))
    parts = tokens[: corpus.train_tokens], tokens[corpus.train_tokens :]
    return [part.decode("latin1").split("\xff")[:-1] for part in parts], corpus


def test_documents_for_validation_are_chosen_by_hash_and_stay_when_others_come(tmp_path):
    words = [f"document {i:04}" for i in range(600)]
    (train, validation), corpus = split(tmp_path / "a", words)
    assert sorted(train + validation) == words and 10 < len(validation) < 60
    assert train == sorted(train) and validation == sorted(validation)  # in order
    assert corpus.validation == f"{len(validation)} of 600 documents, by hash"
    (more_train, more), _ = split(tmp_path / "b", [f"x {i}" for i in range(300)] + words)
    assert [word for word in more if word in words] == validation
    assert len(more) > len(validation) and len(more + more_train) == 900


def test_of_few_documents_the_last_tokens_are_for_validation(tmp_path):
    for count in 1, 39:
        words = [f"document {i:04}" for i in range(count)]
        data.write_corpus([(word, True) for word in words], "byte", tmp_path / str(count), np.inf)
        corpus = data.load(str(tmp_path / str(count)))
        expected = "".join(f"{word}\xff" for word in words).encode("latin1")
        assert bytes(min(token, 255) for token in ids(corpus)) == expected
        assert corpus.train_tokens == int(0.95 * len(expected))
        assert corpus.validation == "the last 5%"
    # nor does the hash count if it chooses none
    candidates = (f"document {i:04}" for i in range(999))
    words = [word for word in candidates if not text.is_validation(word.encode())][:50]
    data.write_corpus([(word, True) for word in words], "byte", tmp_path / "none", np.inf)
    corpus = data.load(str(tmp_path / "none"))
    assert (corpus.train_tokens, corpus.validation) == (int(0.95 * 50 * 14), "the last 5%")
    assert {path.name for path in (tmp_path / "none").iterdir()} == {"tokens.bin", "meta.json"}


@pytest.mark.parametrize("count", [40, 41, 60, 100])
def test_one_more_document_moves_none_of_the_others_whatever_their_lengths(tmp_path, count):
    draw = np.random.default_rng(count)
    for trial in range(10):
        lengths = draw.lognormal(4, 1.5, count + 1).astype(int)
        words = [f"{trial} {i} " + "x" * length for i, length in enumerate(lengths)]
        if not any(text.is_validation(word.encode()) for word in words[:-1]):
            continue
        parts, _ = split(tmp_path / f"{trial}", words[:-1])
        more, _ = split(tmp_path / f"{trial} more", words)
        for part, larger in zip(parts, more):
            assert [word for word in larger if word != words[-1]] == part


def test_folder_in_the_making_leaves_the_signal_handlers_as_they_were(tmp_path):
    before = [signal.getsignal(number) for number in (*text.STOPS, signal.SIGALRM)]
    with text.new_folder(tmp_path / "a"):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    with pytest.raises(SystemExit), text.new_folder(tmp_path / "b"):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), text.new_folder(tmp_path / "c"):
        signal.raise_signal(signal.SIGINT)  # ends a test suite or a notebook's cell as ever
    assert [signal.getsignal(number) for number in (*text.STOPS, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def write_words(monkeypatch, out, tokens, n_vocab, model):
    """A corpus of one document with these tokens. model: the size of its vocabulary."""
    words = SimpleNamespace(name="words", eot_token=0, n_vocab=n_vocab, begin=[])
    words.encode_batch = lambda texts: [np.array(tokens) for _ in texts]
    monkeypatch.setattr(text, "read_tokenizer", lambda name: (name, model))
    monkeypatch.setattr(text, "make_tokenizer", lambda name: words)
    data.write_corpus([("text", True)], "words", str(out), np.inf)


def test_tokens_of_a_large_vocabulary_are_written_in_four_bytes(tmp_path, monkeypatch):
    for largest, width in (2**16 - 1, 2), (2**16, 4):
        out = tmp_path / str(largest)
        write_words(monkeypatch, out, [1, largest], n_vocab=largest + 1, model=300)
        assert ids(data.load(str(out))) == [1, largest, 0]
        assert (out / "tokens.bin").stat().st_size == 3 * width


def test_vocabulary_of_a_corpus_is_its_models_as_long_as_that_has_all_tokens(
    tmp_path, monkeypatch
):
    """The tokenizer may have more tokens than the model: an added <pad>."""
    for largest, model, vocab_size in (299, 300, 300), (7, 300, 300), (300, 300, 301):
        out = tmp_path / f"{largest}"
        write_words(monkeypatch, out, [largest, 1], n_vocab=301, model=model)
        assert data.load(str(out)).vocab_size == vocab_size


def test_vocabulary_of_a_folder_is_that_of_config_json_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "make_tokenizer", lambda name: SimpleNamespace(n_vocab=301))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert text.read_tokenizer(str(tmp_path)) == ("{}", 301)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    assert text.read_tokenizer(str(tmp_path)) == ("{}", 300)


def write_folder(folder, ids, **changes):
    """A corpus folder with these tokens; changes: of meta.json."""
    folder.mkdir()
    ids.tofile(folder / "tokens.bin")
    meta = dict(tokenizer="byte", vocab_size=257, dtype="uint16", bytes_per_token=1.0, hash="0")
    meta |= dict(tokens=len(ids), train_tokens=len(ids) // 2)
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return str(folder)


def test_damaged_folders_few_and_foreign_tokens_are_refused(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    cut = write_folder(tmp_path / "cut", tokens, tokens=101)
    with pytest.raises(UserError, match="^--data .*: damaged .*tokens.bin has 100 tokens"):
        data.load(cut)
    Path(cut, "meta.json").write_text("{")
    with pytest.raises(UserError, match="^--data .*: damaged"):
        data.load(cut)
    strange = ({"dtype": "foo"}, {"vocab_size": "257"}, {"new": 1}, {"tokenizer": "tokenizer.json"})
    for k, changes in enumerate(strange):
        with pytest.raises((UserError, OSError)) as error:
            data.load(write_folder(tmp_path / str(k), tokens, **changes))
        assert explain(error.value)[0] == 2
    corpus = data.load(write_folder(tmp_path / "short", tokens))
    data.check_windows(corpus, 49)
    with pytest.raises(UserError, match="needs at least 51"):
        data.check_windows(corpus, 50)
    foreign = write_folder(tmp_path / "foreign", tokens, vocab_size=99)
    with pytest.raises(UserError, match="token 99 .*tokens.bin, position 99.*vocabulary has 99"):
        data.load(foreign)


PIPES = {  # a pipe -> what opens it
    "tokens/meta.json": lambda folder: data.load(str(folder / "tokens")),
    "tokens/tokens.bin": lambda folder: data.load(str(folder / "tokens")),
    "tokens/tokenizer.json": lambda folder: data.load(str(folder / "tokens")),
    "hf/tokenizer.json": lambda folder: text.read_tokenizer(str(folder / "hf")),
    "hf/config.json": lambda folder: text.read_tokenizer(str(folder / "hf")),
}


@pytest.mark.parametrize("name", PIPES)
def test_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, monkeypatch, name):
    write_folder(tmp_path / "tokens", np.arange(100, dtype=np.uint16), tokenizer="tokenizer.json")
    for folder in "hf", "llama":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    def too_late(*args):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(5)
    try:
        with pytest.raises(UserError, match=f"{name}: not a regular file"):
            PIPES[name](tmp_path)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def write_shard(path, tokens, count=None, kind=(20240520, 1), dtype=np.uint16):
    """As llm.c and modded-nanogpt write it."""
    header = np.zeros(256, np.int32)
    header[:3] = *kind, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return str(path)


def test_token_files_of_a_large_vocabulary_are_read_in_four_bytes(tmp_path):
    large = np.arange(128_000, 128_256, dtype=np.uint32)
    shard = write_shard(tmp_path / "shard.bin", large, kind=(20240801, 7), dtype=np.uint32)
    large.tofile(tmp_path / "bare.bin")  # as nanoGPT's, with another tokenizer
    for name in shard, str(tmp_path / "bare.bin"), [shard, str(tmp_path / "bare.bin")]:
        corpus = data.load(name, 128_256)
        assert ids(corpus) == large.tolist() * len(corpus.tokens.arrays)
        assert all(isinstance(array.base, mmap.mmap) for array in corpus.tokens.arrays)
    # one token beyond two bytes decides
    small = np.arange(256, dtype=np.uint16)
    small.tofile(tmp_path / "small.bin")
    assert ids(data.load(str(tmp_path / "small.bin"), 2**16)) == small.tolist()
    assert data.load(str(tmp_path / "bare.bin"), 2**17).tokens.arrays[0].dtype == np.uint32
    short = write_shard(tmp_path / "short.bin", small)  # its header counts, not --vocab_size
    assert ids(data.load(short, 128_256)) == small.tolist()
    assert ids(data.load([short, shard], 128_256)) == [*small.tolist(), *large.tolist()]
    for path in shard, str(tmp_path / "bare.bin"):  # the way out is named
        with pytest.raises(UserError, match="larger --vocab_size"):
            data.load(path)
    with pytest.raises(UserError, match="has 256 tokens, its header says 9"):
        kind = dict(kind=(20240801, 7), dtype=np.uint32)
        data.load(write_shard(tmp_path / "cut.bin", large, count=9, **kind), 128_256)


RAMP = np.arange(1000, dtype=np.uint16)


def check_windows_are_runs(corpus):
    """All training tokens are seen, and windows cross the borders of files."""
    seen = torch.cat(batch(corpus, size=12800))
    assert seen.min() == 0
    assert seen.max() == corpus.train_tokens - 1
    assert (seen.diff() == 1).all()


def test_token_files_of_nanogpt_are_read_in_place(tmp_path):
    train = str(tmp_path / "train.bin")
    RAMP[:900].tofile(train)
    RAMP[900:].tofile(tmp_path / "val.bin")
    corpus = data.load(train, vocab_size=1000)
    assert ids(corpus) == RAMP.tolist()
    assert (corpus.train_tokens, corpus.vocab_size) == (900, 1000)
    assert all(isinstance(array.base, mmap.mmap) for array in corpus.tokens.arrays)
    check_windows_are_runs(corpus)
    (tmp_path / "val.bin").unlink()
    assert data.load(train).train_tokens == 855  # the usual share


def test_shards_of_llm_c_are_one_corpus(tmp_path):
    shards = {"val_0": RAMP[900:], "train_2": RAMP[7:900], "train_1": RAMP[:7]}
    for name, part in shards.items():
        write_shard(tmp_path / f"x_{name}.bin", part)
    folder = str(tmp_path)
    files = tuple(str(tmp_path / f"x_train_{i}.bin") for i in (1, 2))
    found = {}
    for names in folder, files:
        corpus = data.load(names, vocab_size=1000)
        found[names] = (len(corpus.tokens), corpus.train_tokens)
        check_windows_are_runs(corpus)
    assert found == {folder: (1000, 900), files: (900, 855)}
    assert data.load(files).hash != data.load(folder).hash


IDS = np.random.default_rng(1).integers(0, 200, 1000)
RANDOM = np.random.default_rng(1).normal(size=1000)


def write_megatron(folder, ids, code=4, dtype=np.int32, lengths=(600, 400)):
    """x.bin beside x.idx, as Megatron's tools write them."""
    np.array(ids, dtype).tofile(folder / "x.bin")
    head = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code])
    head += len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little")
    (folder / "x.idx").write_bytes(head + np.array(lengths, np.int32).tobytes() + bytes(40))


def write_pair(folder, ids, held_out):
    """A training file, and one that is for validation by its name."""
    ids[:900].astype(np.uint16).tofile(folder / "part_train_0.bin")
    ids[900:].astype(np.uint16).tofile(folder / held_out)


def write_header(folder, magic, dtype=np.uint16, count=1000, width=0):
    kind = (magic, 1)
    path = Path(write_shard(folder / "x.bin", IDS, count, kind, dtype))
    words = bytearray(path.read_bytes())
    words[12] = width  # NeMo's files say how wide an id is
    path.write_bytes(words)


def write_behind(folder, header, count, dtype=np.uint16):
    """So many ids behind a header of these int32."""
    ids = np.resize(IDS, count).astype(dtype)
    (folder / "x.bin").write_bytes(np.array(header, np.int32).tobytes() + ids.tobytes())


def write_count(folder, count):
    """A damaged number of documents."""
    write_megatron(folder, IDS)
    content = bytearray((folder / "x.idx").read_bytes())
    content[18:26] = count.to_bytes(8, "little")
    (folder / "x.idx").write_bytes(content)


def write_late(folder, wrong=250, dtype=np.uint16):
    """One bad id, behind what is looked at when the file is opened."""
    ids = np.tile(IDS, 1300).astype(dtype)
    ids[1_200_003] = wrong
    ids.tofile(folder / "train.bin")


PROSE_OF_OTHERS = "naïve words, one behind the other.\n" * 30
LETTERS = [int.from_bytes(b"TOKN", "little"), 1]
MASKED = np.where(IDS < 3, -100, IDS)  # as labels that do not count
NO_TOKENS = {  # format -> a file of it, of an even number of bytes
    "safetensors": (64).to_bytes(8, "little") + b'{"w": {}}' + b" " * 55 + bytes(2000),
    "parquet": b"PAR1" + bytes(range(256)) * 8,
    "gz": gzip.compress(RANDOM.tobytes()).ljust(9000, b"\0"),
    "text": PROSE_OF_OTHERS.encode() + b"\n" * (len(PROSE_OF_OTHERS.encode()) % 2),
    "lz4": b"\x04\x22\x4d\x18" + bytes(range(256)) * 8,
    "utf-16": PROSE_OF_OTHERS.encode("utf-16"),
}


def holding(content):
    return lambda folder: (folder / "x.bin").write_bytes(content)


TOKENS_OF_OTHERS = {  # -> how many are for training, or what the line says
    "int64": (lambda f: IDS.astype(np.int64).tofile(f / "x.bin"), 950),
    "int32": (lambda f: IDS.astype(np.int32).tofile(f / "x.bin"), 950),
    "uint32": (lambda f: IDS.astype(np.uint32).tofile(f / "x.bin"), 950),
    "uint16": (lambda f: IDS.astype(np.uint16).tofile(f / "x.bin"), 950),
    "large-ids": (lambda f: (IDS + 99_000).astype(np.int32).tofile(f / "x.bin"), "token 99"),
    "odd-int64": (lambda f: (f / "x.bin").write_bytes(IDS.tobytes()[:-1]), "damaged"),
    "megatron": (lambda f: write_megatron(f, IDS), 950),
    "megatron-uint16": (lambda f: write_megatron(f, IDS, 8, np.uint16), 950),
    "megatron-float": (lambda f: write_megatron(f, IDS, 7), "no token ids"),
    "megatron-cut": (lambda f: write_megatron(f, IDS[:-1]), "999 tokens, x.idx 1,000"),
    "other-idx": (lambda f: [write_megatron(f, IDS), (f / "x.idx").write_bytes(b"TNTIDX")],
                  "no index"),
    "nemo": (lambda f: write_header(f, 278895051, width=2), 950),
    "nemo-uint32": (lambda f: write_header(f, 278895051, np.uint32, width=4), 950),
    "header": (lambda f: write_header(f, 7, count=1001), "header of an unknown kind"),
    "header-more": (lambda f: write_behind(f, [99, 1, 4000, *[0] * 17, 7, *[0] * 235], 4001),
                    "header of an unknown kind"),
    "header-short": (lambda f: write_behind(f, [99, 1, 2, 3000], 3000), "header of an unknown kind"),
    "header-512": (lambda f: write_behind(f, [7, 3000, *range(1, 127)], 3000, np.uint32),
                   "header of an unknown kind"),
    "header-count": (lambda f: write_behind(f, [3000, 0], 3000), "header of an unknown kind"),
    "header-count-only": (lambda f: write_behind(f, [3000], 3000), "header of an unknown kind"),
    "header-letters": (lambda f: write_behind(f, LETTERS, 3000), "header of an unknown kind"),
    "header-more-letters": (lambda f: write_behind(f, [*LETTERS[:1] * 2, 0], 3000),
                            "header of an unknown kind"),
    **{f"is-{kind}": (holding(content), f"x.bin has {kind}, not token ids.*data.py --input")
       for kind, content in NO_TOKENS.items()},
    "named-bin": (lambda f: [np.save(f / "x.npy", IDS), (f / "x.npy").rename(f / "x.bin")],
                  "x.bin has npy, not token ids"),
    "int32-negative": (lambda f: MASKED.astype(np.int32).tofile(f / "x.bin"), "negative ids"),
    "int64-negative": (lambda f: MASKED.astype(np.int64).tofile(f / "x.bin"), "negative ids"),
    "float32": (lambda f: RANDOM.astype(np.float32).tofile(f / "x.bin"), "fractions .float32"),
    "float64": (lambda f: RANDOM.tofile(f / "x.bin"), "fractions .float64"),
    "uint64-large": (lambda f: (IDS.astype(np.uint64) + 2**63).tofile(f / "x.bin"), "no ids"),
    "megatron-count": (lambda f: write_count(f, 2**40), "x.idx is damaged"),
    "megatron-overflow": (lambda f: write_count(f, 2**63 + 5), "x.idx is damaged"),
    "npy": (lambda f: np.save(f / "edu_train_0.npy", IDS.astype(np.uint16)), 950),
    "npy-int64": (lambda f: np.save(f / "x.npy", IDS), 950),
    "npy-float": (lambda f: np.save(f / "x.npy", IDS / 2), "no row of token ids"),
    "npy-2d": (lambda f: np.save(f / "x.npy", IDS.reshape(2, -1)), "no row of token ids"),
    "npy-objects": (lambda f: np.save(f / "x.npy", np.array([None])), "damaged"),
    "npy-negative": (lambda f: np.save(f / "x.npy", -IDS), "contains token -.*data.py$"),
    "two-kinds": (lambda f: [IDS.tofile(f / "x.bin"), np.save(f / "x.npy", IDS)], "those that you"),
    "pipe": (lambda f: os.mkfifo(f / "x.bin"), "not a regular file"),
    "only-validation": (lambda f: IDS.tofile(f / "val.bin"), "all files are for validation"),
    "late-negative": (lambda f: write_late(f, -1, np.int32), "position 1,200,003.*with data.py$"),
    "late": (write_late, "contains token 250 .*train.bin, position 1,200,003"),
    **{name: ((lambda name: lambda f: write_pair(f, IDS, name))(name), 900) for name in (
        "validation.bin", "a_valid_0.bin", "val.bin", "dev.bin", "Test-1.bin", "fineweb_val_01.bin",
    )},
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENS_OF_OTHERS)
def test_tokens_of_other_programs_are_read_right_or_refused_in_one_line(tmp_path, case):
    make, expected = TOKENS_OF_OTHERS[case]
    make(tmp_path)
    try:
        corpus = data.load([str(tmp_path)], 200)
        found = corpus.train_tokens
        read = ids(corpus)
        data.Batches(corpus, 16, 1).windows(np.arange(0, len(read) - 16, 16))
    except (UserError, OSError) as error:
        code, line = explain(error)
        assert code == 2 and len(line.splitlines()) == 1
        assert isinstance(expected, str) and re.search(expected, line), line
        return
    assert found == expected
    assert read == IDS.tolist()
    for name in (path.name for path in tmp_path.iterdir() if path.suffix != ".idx"):
        assert name in corpus.describe()


@pytest.mark.parametrize("first", [[0x8B1F, 9], [0x7B1E, 9], [0x5A42, 9], [0x4F54, 0x4E4B, 1, 1]])
def test_first_ids_that_resemble_another_format_are_ids(tmp_path, first):
    found = np.append(first, IDS)
    found.astype(np.uint16).tofile(tmp_path / "x.bin")
    assert ids(data.load([str(tmp_path)])) == found.tolist()


def test_training_file_of_a_set_named_dev_is_not_for_validation(tmp_path):
    for name, part in ("train_0", IDS[:900]), ("val_0", IDS[900:]):
        part.astype(np.uint16).tofile(tmp_path / f"fineweb_dev_{name}.bin")
    assert data.load([str(tmp_path)], 200).train_tokens == 900


def test_validation_files_may_be_in_a_folder_of_that_name(tmp_path):
    for name, part in ("train", IDS[:900]), ("test", IDS[900:]):
        (tmp_path / name).mkdir()
        part.astype(np.uint16).tofile(tmp_path / name / "0.bin")
    corpus = data.load([str(tmp_path / "train"), str(tmp_path / "test")], 200)
    assert (ids(corpus), corpus.train_tokens) == (IDS.tolist(), 900)
    assert data.load([str(tmp_path / "test")], 200).train_tokens == 95  # a name of one's own
    files = [str(path) for path in sorted(tmp_path.glob("t*/*.bin"))]  # as the shell writes them
    assert data.load(files, 200).train_tokens == 900
    assert data.load(files[:1], 200).train_tokens == 95


def test_path_with_a_colon_is_one_path(tmp_path):
    (tmp_path / "run_13:30").mkdir()
    file = str(tmp_path / "run_13:30" / "train.bin")
    other = str(tmp_path / "b.bin")
    for path in file, other:
        IDS.astype(np.uint16).tofile(path)
    argv = ["--method=minibatch", "--data", file, other]
    config, given = parse(argv, train.METHODS)
    assert config.data == given["data"] == [file, other]
    assert len(data.load(config.data, 200).tokens) == 2000
    assert len(data.load(file, 200).tokens) == 1000


def test_file_behind_a_link_keeps_the_name_of_the_link(tmp_path):
    """As in the cache of Hugging Face's hub."""
    for name, part in ("train.bin", IDS[:900]), ("val.bin", IDS[900:]):
        part.astype(np.uint16).tofile(tmp_path / f"blob{len(part)}")
        (tmp_path / name).symlink_to(tmp_path / f"blob{len(part)}")
    assert data.load([str(tmp_path)], 200).train_tokens == 900


def test_third_of_several_files_begins_with_its_first_token(tmp_path):
    for i in range(4):
        RAMP[250 * i : 250 * (i + 1)].tofile(tmp_path / f"x_{i}.bin")
    assert ids(data.load([str(tmp_path)], 1000)) == RAMP.tolist()


def test_hash_of_a_large_file_changes_with_its_end(tmp_path):
    hashes = set()
    for last in 1, 2:
        tokens = np.ones(2**20 + 100, np.uint16)
        tokens[-1] = last
        tokens.tofile(tmp_path / "x.bin")
        hashes.add(data.load(str(tmp_path)).hash)
    assert len(hashes) == 2


@pytest.mark.parametrize("changes", [
    dict(train_tokens="100"), dict(train_tokens=None), dict(train_tokens=[1]),
    dict(train_tokens=float("nan")), dict(train_tokens=101), dict(train_tokens=-1),
    dict(vocab_size=257.0), dict(bytes_per_token=0), dict(bytes_per_token="1"),
    dict(bytes_per_token=None), dict(bytes_per_token=-1), dict(hash=5), dict(tokenizer=None),
    dict(dtype="2u1"), dict(dtype="uint8"), dict(tokens="100"),
])  # fmt: skip
def test_strange_values_of_meta_json_are_refused_when_the_corpus_is_opened(tmp_path, changes):
    folder = write_folder(tmp_path / "folder", np.arange(100, dtype=np.uint16), **changes)
    with pytest.raises(UserError, match="^--data .*: damaged"):
        data.load(folder)


def test_hash_of_token_files_changes_with_their_ends_and_middle(tmp_path):
    hashes = set()
    for change in 0, 499, 999:
        changed = write_shard(tmp_path / "changed.bin", RAMP + (RAMP == change))
        hashes.add(data.load(changed).hash)
    assert len(hashes) == 3


def test_validation_files_have_the_word_val_in_their_name_not_its_letters(tmp_path):
    for name in "evaluation.bin", "interval_1.bin":
        RAMP.tofile(tmp_path / name)
    again = tmp_path / ".." / tmp_path.name / "interval_1.bin"
    twice = [str(tmp_path / "interval_1.bin"), str(again)]  # it counts once
    for names in str(tmp_path / "evaluation.bin"), twice:
        corpus = data.load(names, 1000)
        assert (len(corpus.tokens), corpus.train_tokens) == (1000, 950)


def test_damaged_and_foreign_token_files_are_refused(tmp_path):
    large = write_shard(tmp_path / "large.bin", [0, 60_000])
    with pytest.raises(UserError, match="its vocabulary has 50257 tokens: .* larger --vocab_size"):
        data.load(large)
    cut = write_shard(tmp_path / "cut.bin", RAMP, count=9)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").touch()
    wrong = {
        cut: "1,000 tokens, its header says 9",
        str(tmp_path / "odd.bin"): "damaged",
        str(tmp_path / "empty.bin"): "damaged",
        str(tmp_path): "damaged",
        __file__: "no token files; name",
    }
    for path, message in wrong.items():
        with pytest.raises(UserError, match=f"^--data .*{message}"):
            data.load(path)


def test_files_of_a_corpus_folder_are_no_token_files(corpus_folder):
    for names in f"{corpus_folder}/tokens.bin", [str(corpus_folder)] * 2:
        with pytest.raises(UserError, match="no token files; .* or one corpus folder"):
            data.load(names)


def test_vocabulary_may_be_padded_and_cut_to_the_tokens_that_are_used(tmp_path):
    folder = write_folder(tmp_path / "folder", np.arange(100, dtype=np.uint16))
    for vocab_size in 320, 100:
        assert data.load(folder, vocab_size).vocab_size == vocab_size
    for name, used in (folder, 100), (None, 257):
        with pytest.raises(UserError, match=f"contains token {used - 1} .* {used - 1} tokens"):
            data.load(name, used - 1)


def test_without_a_network_the_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", None)  # calling it raises an error
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR.*--tokenizer byte"):
        tokenizer.make_tokenizer("gpt2")


def test_cores_are_counted_also_where_a_process_has_no_set_of_them(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert tokenizer.count_cores() == os.cpu_count()


def test_fast_pieces_of_gpt2_are_those_of_its_own_pattern(monkeypatch):
    """A vocabulary of bytes and some longer ones, and texts with runs of white space of all kinds,
    marks, and what Python, but not Unicode, calls white space."""
    words = [b" a", b"ab", b"  ", b"    ", b"\n\n", b"\n ", b" \n", b"\r\n", b"'s", b" 1"]
    words += [b"\x1c\x1c"]
    others = ["", "é漢²", "\x1c\v\f", "\0", "\x85\xa0\u2003", "<|endoftext|>"]
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {word: 256 + number for number, word in enumerate(words)}
    own = tiktoken.Encoding(
        "gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", lambda name: own)
    made = tokenizer.make_tokenizer("gpt2")
    draw = random.Random(0)
    fast = 0
    for number in range(1200):
        letters = "ab1.' \n\t\r" + draw.choice(others)
        text = "".join(draw.choices(letters, k=draw.randrange(12)))
        if number % 10 == 0:
            text += "<|endoftext|>" + " " * draw.randrange(4) + "'s"
        fast += tokenizer.mark_runs(text) is not None
        expected = own.encode_ordinary(text)
        assert made.encode(text).tolist() == expected, repr(text)
        assert next(made.encode_batch([text])).tolist() == expected, repr(text)
    assert fast > 800


def test_panic_of_a_tokenizer_is_one_line_and_ctrl_c_stays_what_it_is():
    class PanicException(BaseException):  # as the package tokenizers raises it
        pass

    with pytest.raises(UserError, match="cannot encode this text .retry-limit-in-match over.$"):
        with tokenizer.no_panic():
            raise PanicException("retry-limit-in-match\nover")
    for other in KeyboardInterrupt, SystemExit:
        with pytest.raises(other), tokenizer.no_panic():
            raise other


def test_bytes_become_tokens_and_text_again_even_if_they_are_damaged():
    byte = tokenizer.make_tokenizer("byte")
    text = "naïve\r\n\tπ 🙂 <|endoftext|>"
    assert byte.encode(text).tolist() == list(text.encode()) and byte.encode("").tolist() == []
    assert byte.decode(byte.encode(text).tolist()) == text
    assert byte.decode([0xC3, 97]) == "\ufffda"
    assert byte.encode("a\udcff").tolist() == [97, 63]  # of a command line that is not UTF-8


UNNOTICED = """
import os, signal, threading, time
from plumbing.text import new_folder

threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
with new_folder("out"):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in this thread
    os.write(1, b"x")
    os.read(0, 1)
"""


def test_signal_that_does_not_interrupt_a_read_is_noticed(tmp_path):
    """It may come just before the read. Here another thread gets it, with the same effect."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", UNNOTICED], cwd=tmp_path, **pipes)
    process.stdout.read(1)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_ended_program_leaves_no_unfinished_folder(tmp_path):
    os.mkfifo(tmp_path / "in.txt")
    argv = [sys.executable, ROOT / "data.py", "--input", "in.txt", "--out", "out"]
    process = subprocess.Popen(argv, cwd=tmp_path)
    with open(tmp_path / "in.txt", "w"):  # it waits for text
        while not list(tmp_path.glob("out.partial-*")):
            time.sleep(0.02)
        process.terminate()
        assert process.wait(300) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]
