"""Corpora and batches: pure functions of their arguments, whole files or none, one line per
mistake."""

import json
import sys
import time
import types

import numpy as np
import pytest
import torch

import data
from flags import UserError


def batch(corpus, step=0, micro=0, rank=0, world=1, size=2, accum=1, T=8, seed=1):
    return data.train_batch(corpus, seed, step, micro, rank, world, size, accum, T)


def test_batch_is_a_pure_function_of_its_arguments(corpus):
    assert torch.equal(batch(corpus, step=5)[0], batch(corpus, step=5)[0])
    others = [
        dict(step=6), dict(step=5, seed=2),
        dict(step=5, rank=1, world=2), dict(step=5, micro=1, accum=2),
    ]  # fmt: skip
    for other in others:
        assert not torch.equal(batch(corpus, **other)[0], batch(corpus, step=5)[0])


def test_global_batch_does_not_depend_on_the_mesh(corpus):
    alone = torch.cat([batch(corpus, micro=m, accum=4, size=2)[0] for m in range(4)])
    ranks = torch.cat([batch(corpus, rank=r, world=4, size=2)[0] for r in range(4)])
    wide = batch(corpus, size=8)[0]
    assert torch.equal(alone, ranks) and torch.equal(alone, wide)


def test_targets_are_the_inputs_shifted_by_one(corpus):
    inputs, targets = batch(corpus, size=64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == torch.int64


def test_training_never_reads_validation_tokens():
    tokens = np.arange(1000, dtype=np.uint16)
    corpus = data.Corpus(tokens, 900, "byte", 1000, 1.0, "")
    seen = torch.cat([batch(corpus, step=step, size=64)[1] for step in range(200)])
    assert seen.max() == 899 and batch(corpus)[0].min() >= 0
    windows = torch.cat([inputs for inputs, _, _ in data.validation_batches(corpus, 1, 0, 1, 4, 8)])
    assert windows.min() == 900 and windows.max() <= 999


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
    started = time.perf_counter()
    corpus = data.load(None)
    assert time.perf_counter() - started < 20
    assert len(corpus.tokens) > 4e6 and corpus.vocab_size == 257
    assert 0.01 < len(corpus.validation) / len(corpus.tokens) < 0.15
    assert corpus.hash == data.load(None).hash
    text = data.tokenizer("byte").decode(corpus.validation[:2000].tolist(), errors="replace")
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


def test_large_token_file_is_mapped_and_a_batch_takes_well_under_a_millisecond(tmp_path):
    import resource

    count = 500_000_000  # 1 GB of uint16, sparse on disk
    (tmp_path / "big").mkdir()
    with open(tmp_path / "big" / "tokens.bin", "wb") as file:
        file.truncate(2 * count)
    meta = dict(tokenizer="byte", vocab_size=257, dtype="uint16", bytes_per_token=1.0, hash="0")
    meta |= dict(tokens=count, train_tokens=count - 10_000)
    (tmp_path / "big" / "meta.json").write_text(json.dumps(meta))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    corpus = data.load(str(tmp_path / "big"))
    times = []
    for step in range(50):
        started = time.perf_counter()
        batch(corpus, step=step, size=8, T=256, world=8)
        times.append(time.perf_counter() - started)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB, of 1 GB
    assert sorted(times)[25] < 1e-3


BAD_INPUT = {
    "missing": (None, "no_such.txt", "No such file"),
    "empty": (b"", "empty.txt", "no text"),
    "binary": (b"\xff\xfe\x00", "binary.txt", "not UTF-8"),
    "not json": (b"{oops\n", "bad.jsonl", "line 1"),
    "no text field": (b'{"text": "x"}\n{"body": 1}\n', "bad2.jsonl", "line 2"),
    "text is a number": (b'{"text": 5}\n', "bad3.jsonl", "line 1"),
}


@pytest.mark.parametrize("content, name, message", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_nothing_is_written(content, name, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        data.write_corpus(data.text_documents([tmp_path / name]), "byte", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_existing_folder_is_not_overwritten(corpus_folder):
    before = (corpus_folder / "tokens.bin").read_bytes()
    with pytest.raises(UserError, match="there already"):
        data.write_corpus([["text"]], "byte", corpus_folder)
    assert (corpus_folder / "tokens.bin").read_bytes() == before


def test_max_tokens_ends_the_stream_after_a_document(tmp_path):
    documents = (["x" * 9] for _ in range(1000))
    meta = data.write_corpus(documents, "byte", tmp_path / "out", max_tokens=25)
    assert meta["tokens"] == 30


def test_gpt2_without_network_names_the_way_out(monkeypatch):
    def offline(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(data.tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR.*--tokenizer byte"):
        data.tokenizer("gpt2")


def test_gpt2_sized_vocabularies_are_stored_in_the_smallest_type(monkeypatch, tmp_path):
    for size, dtype in ((50257, "uint16"), (100000, "uint32")):
        fake = types.SimpleNamespace(
            n_vocab=size, eot_token=size - 1, encode_to_numpy=lambda text, **_: np.array([5, 7])
        )
        monkeypatch.setattr(data, "tokenizer", lambda name: fake)
        meta = data.write_corpus([["text"]], "gpt2", tmp_path / dtype)
        assert meta["dtype"] == dtype
        assert data.load(str(tmp_path / dtype)).tokens.tolist() == [5, 7, size - 1]


def test_fineweb_streams_through_the_datasets_library(monkeypatch, tmp_path):
    calls = []

    def load_dataset(path, **options):
        calls.append((path, options))
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    data.write_corpus(data.fineweb_documents(), "byte", tmp_path / "out")
    assert bytes(t for t in data.load(str(tmp_path / "out")).tokens if t < 256) == b"onetwo"
    options = dict(name="sample-10BT", split="train", streaming=True)
    assert calls == [("HuggingFaceFW/fineweb-edu", options)]


def test_fineweb_without_the_library_or_the_network_names_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        list(data.fineweb_documents())

    def offline(*args, **options):
        raise OSError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(UserError, match="--input"):
        list(data.fineweb_documents())
