"""Corpora and batches: pure functions of their arguments; a folder is whole or does not exist.
Wrong input of the command line is in test_cli.py."""

import json
import resource
import sys
import types

import numpy as np
import pytest
import torch

import data
from plumbing.config import UserError


def batch(corpus, step=0, micro=0, rank=0, world=1, size=2, accum=1, T=8, seed=1):
    return data.train_batch(corpus, seed, step, micro, rank, world, size, accum, T)


def test_batch_is_a_pure_function_and_the_global_batch_does_not_depend_on_the_mesh(corpus):
    assert torch.equal(batch(corpus)[0], batch(corpus)[0])
    for other in dict(step=1), dict(seed=2), dict(rank=1, world=2), dict(micro=1, accum=2):
        assert not torch.equal(batch(corpus, **other)[0], batch(corpus)[0])
    alone = torch.cat([batch(corpus, micro=m, accum=4, size=2)[0] for m in range(4)])
    ranks = torch.cat([batch(corpus, rank=r, world=4, size=2)[0] for r in range(4)])
    assert torch.equal(alone, ranks) and torch.equal(alone, batch(corpus, size=8)[0])
    inputs, targets = batch(corpus, size=64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.dtype == torch.int64


def test_training_never_reads_validation_tokens_and_reads_all_others():
    corpus = data.Corpus(np.arange(1000, dtype=np.uint16), 900, "byte", 1000, 1.0, "")
    seen = torch.cat([torch.cat(batch(corpus, step=step, size=64)) for step in range(200)])
    assert seen.min() == 0 and seen.max() == 899
    parts = [torch.cat(both) for *both, _ in data.validation_batches(corpus, 1, 0, 1, 4, 8)]
    assert torch.cat(parts).min() == 900 and torch.cat(parts).max() == 999


def validation_windows(corpus, world, size):
    counted, batches = [], []
    for rank in range(world):
        parts = list(data.validation_batches(corpus, 2, rank, world, size, 8))
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
    assert len(corpus.tokens) > 4e6 and corpus.vocab_size == 257 > corpus.tokens.max()
    assert 0.01 < 1 - corpus.train_tokens / len(corpus.tokens) < 0.15
    assert corpus.tokens[corpus.train_tokens - 1] == 256  # a document ends there
    assert corpus.hash == data.load(None).hash
    assert b"import " in corpus.tokens[corpus.train_tokens :].astype(np.uint8).tobytes()


def test_written_corpus_holds_every_document_up_to_max_tokens(tmp_path, monkeypatch, capsys):
    text = "naïve\r\n\tπ 🙂 <|endoftext|>" + "x" * 1000
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.jsonl").write_text('{"text": "first"}\n\n{"text": "second"}\n{"text": ""}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", "data.py --input a.txt b.jsonl --out out".split())
    data.main()
    expected = [token for part in (text, "first", "second") for token in [*part.encode(), 256]]
    count, corpus = len(expected), data.load("out")
    assert corpus.tokens.tolist() == expected and corpus.train_tokens == int(count * 0.95)
    assert f"out: {count:,} tokens (byte)" in capsys.readouterr().out
    assert corpus.bytes_per_token == pytest.approx((count - 3) / count)
    documents = (("x" * 3, i % 3 == 2) for i in range(3000))  # three pieces each
    assert data.write_corpus(documents, "byte", "cut", max_tokens=25)["tokens"] == 30


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


def test_token_outside_the_vocabulary_is_noticed_when_it_is_read(tmp_path, monkeypatch):
    tokens = np.arange(1000, dtype=np.uint16) % 257
    tokens[-3] = 257
    monkeypatch.setattr(data, "CHECKED_TOKENS", 10)  # a large corpus is checked batch by batch
    corpus = data.load(write_folder(tmp_path / "corpus", tokens))
    batch(corpus, size=100)
    with pytest.raises(UserError, match="contains token 257, but its vocabulary has 257"):
        list(data.validation_batches(corpus, 1, 0, 1, 16, 8))


def test_wrong_meta_data_and_short_corpus_are_refused(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    changes = [dict(dtype="float32"), dict(dtype=[]), dict(tokens=101), dict(vocab_size="many")]
    changes += [dict(train_tokens=-5), dict(train_tokens=101), dict(vocab_size=float("inf"))]
    for i, change in enumerate(changes):
        with pytest.raises(UserError, match="^--data .*: damaged"):
            data.load(write_folder(tmp_path / str(i), tokens, **change))
    corpus = data.load(write_folder(tmp_path / "short", tokens))
    data.check_windows(corpus, 49)
    with pytest.raises(UserError, match="needs at least 51"):
        data.check_windows(corpus, 50)


def test_vocabularies_are_stored_in_the_smallest_type(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "encode", lambda encoding, text: np.array([5, 7]))
    for size, dtype in ((50257, "uint16"), (100000, "uint32")):
        fake = types.SimpleNamespace(n_vocab=size, eot_token=size - 1)
        monkeypatch.setattr(data, "tokenizer", lambda name: fake)
        meta = data.write_corpus([("text", True)], "gpt2", tmp_path / dtype)
        assert meta["dtype"] == dtype
        assert data.load(str(tmp_path / dtype)).tokens.tolist() == [5, 7, size - 1]


def test_downloads_stream_or_name_what_to_do(monkeypatch):
    def offline(*args, **options):
        raise ConnectionError("no route to host")

    module = types.SimpleNamespace(load_dataset=lambda *args, **options: [{"text": "one"}])
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert list(data.fineweb_documents()) == [("one", True)]
    module.load_dataset = offline
    with pytest.raises(UserError, match="ConnectionError.*pip install datasets.*--input"):
        list(data.fineweb_documents())
    monkeypatch.setattr(data.tiktoken, "get_encoding", offline)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR.*--tokenizer byte"):
        data.tokenizer("gpt2")
