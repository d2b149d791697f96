"""Corpora and batches: pure functions of their arguments, whole files or none, one line per
mistake."""

import json
import resource
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import data
from plumbing.config import UserError
from ranks import ROOT


def batch(corpus, step=0, micro=0, rank=0, world=1, size=2, accum=1, T=8, seed=1):
    return data.train_batch(corpus, seed, step, micro, rank, world, size, accum, T)


def test_batch_is_a_pure_function_and_the_global_batch_does_not_depend_on_the_mesh(corpus):
    assert torch.equal(batch(corpus, step=5)[0], batch(corpus, step=5)[0])
    others = [
        dict(step=6), dict(step=5, seed=2),
        dict(step=5, rank=1, world=2), dict(step=5, micro=1, accum=2),
    ]  # fmt: skip
    for other in others:
        assert not torch.equal(batch(corpus, **other)[0], batch(corpus, step=5)[0])
    alone = torch.cat([batch(corpus, micro=m, accum=4, size=2)[0] for m in range(4)])
    ranks = torch.cat([batch(corpus, rank=r, world=4, size=2)[0] for r in range(4)])
    wide = batch(corpus, size=8)[0]
    assert torch.equal(alone, ranks) and torch.equal(alone, wide)
    inputs, targets = batch(corpus, size=64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == torch.int64


def test_training_never_reads_validation_tokens_and_reads_all_others():
    corpus = data.Corpus(np.arange(1000, dtype=np.uint16), 900, "byte", 1000, 1.0, "")
    seen = torch.cat([torch.cat(batch(corpus, step=step, size=64)) for step in range(200)])
    assert seen.min() == 0 and seen.max() == 899
    parts = [torch.cat(both) for *both, _ in data.validation_batches(corpus, 1, 0, 1, 4, 8)]
    assert torch.cat(parts).min() == 900 and torch.cat(parts).max() == 999


@pytest.mark.parametrize("world, size", [(1, 4), (3, 4), (5, 2), (40, 1)])
def test_validation_windows_are_the_same_for_any_split(corpus, world, size):
    def all_windows(world, size):
        counted, batches = [], []
        for rank in range(world):
            parts = list(data.validation_batches(corpus, 2, rank, world, size, 8))
            batches.append(len(parts))
            counted += [row.tolist() for inputs, _, rows in parts for row in inputs[:rows]]
        # a sharded forward is a collective: every rank makes equally many
        assert len(set(batches)) == 1
        return counted

    windows = all_windows(world, size)
    assert len(windows) == 2 * data.VALIDATION_ROWS and windows == all_windows(1, 16)


def test_builtin_corpus_is_megabytes_of_python_split_by_file():
    corpus = data.load(None)
    assert len(corpus.tokens) > 4e6 and corpus.vocab_size == 257 > corpus.tokens.max()
    assert 0.01 < 1 - corpus.train_tokens / len(corpus.tokens) < 0.15
    assert corpus.tokens[corpus.train_tokens - 1] == 256  # a document ends there
    assert corpus.hash == data.load(None).hash
    validation = corpus.tokens[corpus.train_tokens :][:2000]
    text = data.tokenizer("byte").decode(validation.tolist(), errors="replace")
    assert "def " in text or "import" in text


def test_byte_tokenizer_round_trips_and_needs_no_network():
    encoding = data.tokenizer("byte")
    text = "naïve\r\n\tπ 🙂 <|endoftext|>" + "x" * 1000
    tokens = data.encode(encoding, text)
    assert tokens.tolist() == list(text.encode()) and encoding.decode(tokens.tolist()) == text


def test_written_corpus_loads_and_holds_every_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("line one\r\nline two\n".encode())
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second"}\n{"text": ""}\n')
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    data.write_corpus(data.text_documents(paths), "byte", tmp_path / "out")
    corpus = data.load(str(tmp_path / "out"))
    expected = b"line one\r\nline two\n", b"first", b"second"
    assert corpus.tokens.tolist() == [token for text in expected for token in [*text, 256]]
    assert corpus.bytes_per_token == pytest.approx(30 / 33)
    assert corpus.train_tokens == int(33 * 0.95)


def write_folder(folder, ids, **changes):
    """A corpus folder with these tokens; changes: of meta.json."""
    folder.mkdir()
    ids.tofile(folder / "tokens.bin")
    meta = dict(tokenizer="byte", vocab_size=257, dtype=ids.dtype.name, tokens=len(ids))
    meta |= dict(train_tokens=len(ids) // 2, bytes_per_token=1.0, hash="0")
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return str(folder)


def test_large_token_file_is_mapped(tmp_path):
    count = 500_000_000  # 1 GB of uint16, sparse on disk
    sizes = dict(tokens=count, train_tokens=count - 9999)
    folder = write_folder(tmp_path / "big", np.zeros(9, np.uint16), **sizes)
    with open(tmp_path / "big" / "tokens.bin", "r+b") as file:
        file.truncate(2 * count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = data.load(folder)
    for step in range(50):
        batch(corpus, step=step, size=8, T=256, world=8)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KiB, of 1 GB


def test_token_outside_the_vocabulary_is_one_line(tmp_path, monkeypatch):
    tokens = np.arange(1000, dtype=np.uint16) % 257
    tokens[-3] = 257
    with pytest.raises(UserError, match="contains token 257, but its vocabulary has 257"):
        data.load(write_folder(tmp_path / "a", tokens))
    monkeypatch.setattr(data, "CHECKED_TOKENS", 10)  # a large corpus is checked batch by batch
    corpus = data.load(write_folder(tmp_path / "b", tokens))
    batch(corpus, size=100)
    with pytest.raises(UserError, match="contains token 257"):
        list(data.validation_batches(corpus, 1, 0, 1, 16, 8))


def test_damaged_folder_is_one_line(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    changes = [dict(dtype="float32"), dict(dtype=[]), dict(tokens=101), dict(vocab_size="many")]
    changes += [dict(train_tokens=-5), dict(train_tokens=101), dict(vocab_size=float("inf"))]
    folders = [write_folder(tmp_path / str(i), tokens, **c) for i, c in enumerate(changes)]
    folders += [str(tmp_path / "missing"), "x" * 300]
    for name, text in {"deep": "[" * 10**5, "list": "[]", "no json": "\x00"}.items():
        folders.append(write_folder(tmp_path / name, tokens))
        (tmp_path / name / "meta.json").write_text(text)
    folders.append(write_folder(tmp_path / "empty", tokens[:0]))
    for folder in folders:
        with pytest.raises(UserError, match="^--data ") as error:
            data.load(folder)
        assert "\n" not in str(error.value) and len(str(error.value)) < 420
    corpus = data.load(write_folder(tmp_path / "short", tokens))
    data.check_windows(corpus, 49)
    with pytest.raises(UserError, match="needs at least 51"):
        data.check_windows(corpus, 50)


BAD_INPUT = {
    "no_such.txt": (None, "No such file"),
    "empty.txt": (b"", "no text"),
    "binary.txt": (b"\xff\xfe\x00", "not UTF-8"),
    "binary.jsonl": (b'{"text": "\xff"}', "not UTF-8"),
    "no_json.jsonl": (b"{oops\n", "line 1 is not"),
    "no_text.jsonl": (b'{"text": "x"}\n{"body": 1}\n', "line 2 is not"),
    "number.jsonl": (b'{"text": 5}\n', "line 1 is not"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1 is not"),
    "deep.jsonl": (b"[" * 10**5 + b"\n", "line 1 is not"),
    "x" * 300: (None, "File name too long"),
}


def test_bad_input_is_one_line_and_nothing_is_written(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "good.txt").write_text("text\n")
    for name, (content, message) in BAD_INPUT.items():
        if content is not None:
            (tmp_path / "in" / name).write_bytes(content)
        documents = data.text_documents([tmp_path / "in" / name])
        with pytest.raises(UserError, match=message) as error:
            data.write_corpus(documents, "byte", tmp_path / "out")
        assert "\n" not in str(error.value) and len(str(error.value)) < 420
    for out in (tmp_path, tmp_path / ("x" * 300), tmp_path / "good.txt" / "out"):
        with pytest.raises(UserError, match="^--out "):
            data.write_corpus([("text", True)], "byte", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.txt", "in"]


def test_command_line_writes_a_corpus_or_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    command = [sys.executable, ROOT / "data.py", "--input", "a.txt", "--out"]
    run = lambda *more, **options: subprocess.run(
        [*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=60, **options
    )
    done = run("out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "out: 10 tokens (byte), 9 of them for training\n"
    done = run("out")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("data.py: error: --out out exists already")


def test_nonsense_max_tokens_is_one_line(tmp_path, monkeypatch):
    for limit in ("nan", "0", "-1", "inf", "many"):
        argv = ["data.py", "--input", "a.txt", "--out", str(tmp_path / "out"), "--max_tokens"]
        monkeypatch.setattr(sys, "argv", [*argv, limit])
        with pytest.raises(UserError, match="max_tokens"):
            data.main()


def test_max_tokens_ends_the_stream_after_a_document(tmp_path):
    documents = (("x" * 3, i % 3 == 2) for i in range(3000))  # three pieces each
    meta = data.write_corpus(documents, "byte", tmp_path / "out", max_tokens=25)
    assert meta["tokens"] == 30


def test_gpt2_sized_vocabularies_are_stored_in_the_smallest_type(monkeypatch, tmp_path):
    for size, dtype in ((50257, "uint16"), (100000, "uint32")):
        fake = types.SimpleNamespace(
            n_vocab=size, eot_token=size - 1, encode_to_numpy=lambda text, **_: np.array([5, 7])
        )
        monkeypatch.setattr(data, "tokenizer", lambda name: fake)
        meta = data.write_corpus([("text", True)], "gpt2", tmp_path / dtype)
        assert meta["dtype"] == dtype
        assert data.load(str(tmp_path / dtype)).tokens.tolist() == [5, 7, size - 1]


def test_downloads_stream_or_name_the_way_out(monkeypatch, tmp_path):
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        return iter([{"text": "one"}, {"text": "two"}])

    def offline(*args, **options):
        raise ConnectionError("no route to host")

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    data.write_corpus(data.fineweb_documents(), "byte", tmp_path / "out")
    assert bytes(t for t in data.load(str(tmp_path / "out")).tokens if t < 256) == b"onetwo"
    options = dict(name="sample-10BT", split="train", streaming=True)
    assert calls == [("HuggingFaceFW/fineweb-edu", options)]
    module.load_dataset = offline
    with pytest.raises(UserError, match="--input"):
        list(data.fineweb_documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        list(data.fineweb_documents())
    monkeypatch.setattr(data.tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR.*--tokenizer byte"):
        data.tokenizer("gpt2")
