"""Corpora and batches: pure functions of their arguments; a folder is whole or does not exist; what
is no corpus and no text is refused in a line. More wrong input is in test_cli.py."""

import csv
import gzip
import hashlib
import json
import os
import re
import shutil
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
from config import UserError, explain
from plumbing import text, tokenizer
from ranks import ROOT
from rows import each_row

RAMP = np.arange(1000, dtype=np.uint16)


def write_folder(folder, train, val, **changes):
    """A corpus folder with these tokens; changes: of meta.json."""
    folder.mkdir()
    train.tofile(folder / "train.bin")
    val.tofile(folder / "val.bin")
    meta = dict(dtype=train.dtype.name, vocab_size=1000)
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return folder


def make(monkeypatch, *words):
    """python data.py words"""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, words)])
    data.main()


def ids(corpus) -> list:
    return [*corpus.train.tolist(), *corpus.val.tolist()]


# ---- batches ----


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
    corpus = data.Corpus(RAMP[:900], RAMP[900:], 1000, "")
    seen = torch.cat(batch(corpus, size=12800))
    assert seen.min() == 0 and seen.max() == 899
    assert (seen.diff() == 1).all()  # windows are runs
    parts = [torch.cat(both) for *both, _ in data.Batches(corpus, 8, 4).validation(1)]
    assert torch.cat(parts).min() == 900 and torch.cat(parts).max() == 999


def own_documents(lengths, replicas, block_size=4):
    """Of each replica: the documents that its windows reach. Document d has tokens d, d, ... and an
    end of text."""
    texts = [[d] * (length - 1) + [256] for d, length in enumerate(lengths)]
    train = np.concatenate(texts).astype(np.uint16)
    corpus = data.Corpus(train, np.zeros(50, np.uint16), 257, "", eot_token=256)
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
    with pytest.raises(UserError, match="--data_by_replica: .* no eot_token"):
        data.Corpus(RAMP, RAMP, 1000, "").by_replica(2, 4)


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


# ---- the built-in corpus ----


def test_builtin_corpus_is_megabytes_of_python_split_by_file():
    corpus = data.load()
    assert len(corpus) > 4e6 and corpus.vocab_size == 257 > corpus.train.max()
    assert 0.85 < len(corpus.train) / len(corpus) < 0.99
    assert corpus.train[-1] == corpus.eot_token == 256  # a document ends there
    assert b"import " in corpus.val.astype(np.uint8).tobytes()


def test_builtin_corpus_has_the_files_of_the_library_in_order_without_tests(tmp_path, monkeypatch):
    names = ["a/c.py", "b.py", "a/test/d.py", "site-packages/e.py", "f.txt"]
    names += [f"v{i}.py" for i in range(40)]  # the hash chooses some of these
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "broken.py").symlink_to("nowhere")
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: tmp_path)
    corpus = data.load()
    found = bytes(min(token, 255) for token in ids(corpus)).decode("latin1").split("\n\xff")
    assert found[:2] == names[:2] and sorted(found) == sorted(["", *names[:2], *names[5:]])
    assert corpus.val[:-2].astype(np.uint8).tobytes().startswith(b"v")
    tokens = np.array(ids(corpus), np.uint16)
    assert corpus.hash == hashlib.sha256(tokens).hexdigest()[:16]  # that of all earlier records


# ---- text -> folder ----


def test_text_and_json_lines_become_a_corpus_that_holds_every_document(
    tmp_path, monkeypatch, capsys
):
    words = "naïve\r\n\tπ 🙂 <|endoftext|>" + "x" * 1000
    (tmp_path / "a.txt").write_bytes(words.encode())
    (tmp_path / "empty.txt").touch()
    lines = '{"text": "first"}\n\n{"text": null}\n{"text": "second"}\n{"text": ""}\n'
    (tmp_path / "b.JSONL").write_text(lines)
    monkeypatch.chdir(tmp_path)
    make(monkeypatch, "--input", "a.txt", "empty.txt", "b.JSONL", "--out", "new/out")
    expected = [*words.encode(), 256, *b"first", 256, *b"second", 256]
    corpus = data.load("new/out")
    assert ids(corpus) == expected
    assert len(corpus.train) == int(len(expected) * 0.95)
    assert f"new/out: {len(expected):,} tokens (byte): train" in capsys.readouterr().out
    assert json.loads(Path("new/out/meta.json").read_text()) == {
        "dtype": "uint16", "vocab_size": 257, "tokenizer": "byte", "eot_token": 256,
        "bytes_per_token": (len(expected) - 3) / len(expected),
    }  # fmt: skip
    assert isinstance(corpus.train, np.memmap)  # it may be larger than the memory


def test_half_an_emoji_becomes_a_replacement_character(tmp_path, monkeypatch):
    lines = '{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude42"}\n'  # half, and whole
    (tmp_path / "a.jsonl").write_text(lines)
    make(monkeypatch, "--input", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    assert ids(data.load(tmp_path / "out")) == [*"a\ufffd".encode(), 256, *"🙂".encode(), 256]


def test_another_field_than_text_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "ab", "content": "x"}')
    monkeypatch.chdir(tmp_path)
    make(monkeypatch, "--input", "a.jsonl", "--field", "content", "--out", "out")
    assert ids(data.load("out")) == [ord("x"), 256]


def test_long_text_is_read_in_pieces_that_end_with_a_line_and_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    content = "".join(f"{'word ' * (i % 7)}{i}\r\n" for i in range(20_000))
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    pieces = list(data.text_documents([path]))
    assert len(pieces) > 4 and all(piece.endswith("\n") for piece, _ in pieces)
    assert "".join(piece for piece, _ in pieces) == content
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]


def split(folder, words) -> tuple:
    """The documents (texts) of both parts of a corpus that has these."""
    data.write_corpus([(word, True) for word in words], "byte", folder)
    corpus = data.load(folder)
    parts = []
    for part in corpus.train, corpus.val:
        texts = bytes(min(token, 255) for token in part.tolist()).decode("latin1")
        parts.append(texts.split("\xff")[:-1])
    return parts


def test_documents_for_validation_are_chosen_by_hash_and_stay_when_others_come(tmp_path):
    words = [f"document {i:04}" for i in range(600)]
    train, validation = split(tmp_path / "a", words)
    assert sorted(train + validation) == words and 10 < len(validation) < 60
    assert train == sorted(train) and validation == sorted(validation)  # in order
    more_train, more = split(tmp_path / "b", [f"x {i}" for i in range(300)] + words)
    assert [word for word in more if word in words] == validation
    assert len(more) > len(validation) and len(more + more_train) == 900


def test_of_few_documents_the_last_tokens_are_for_validation(tmp_path):
    candidates = [f"document {i:04}" for i in range(999)]
    chosen = [word for word in candidates if text.is_validation(word.encode())]
    others = [word for word in candidates if word not in chosen]
    few = chosen[:20] + others[:19]
    for words in chosen[:1], others[:3], few, others[:50]:  # of the last the hash chooses none
        folder = tmp_path / str(len(words))
        data.write_corpus([(word, True) for word in words], "byte", folder)
        corpus = data.load(folder)
        expected = "".join(f"{word}\xff" for word in words).encode("latin1")
        found = bytes(min(token, 255) for token in ids(corpus))
        assert len(corpus.train) == int(0.95 * len(expected))
        assert sorted(found.split(b"\xff")) == sorted(expected.split(b"\xff"))


def test_tokens_of_a_large_vocabulary_are_written_in_four_bytes(tmp_path, monkeypatch):
    for largest, width in (2**16 - 1, 2), (2**16, 4):
        words = SimpleNamespace(name="byte", eot_token=0, n_vocab=largest + 1, begin=[5])
        words.encode_batch = lambda texts: [[1, largest]]
        monkeypatch.setattr(text, "make_tokenizer", lambda name: words)
        out = tmp_path / str(largest)
        data.write_corpus([("text", True)], "byte", out)
        assert ids(data.load(out)) == [5, 1, largest, 0]
        assert (out / "train.bin").stat().st_size == 3 * width


# ---- what is refused ----

TEXTS_OF_OTHERS = {  # name -> (content, what the line says)
    "a.csv": (b"id,text\n1,word\n", "not a .txt, .jsonl or .parquet: the head of data.py says how"),
    "a.jsonl.gz": (gzip.compress(b'{"text": "a"}\n'), "not a .txt, .jsonl or .parquet"),
    "a.json": (b"[]", "not a .txt, .jsonl or .parquet"),
    "array.jsonl": (b'[{"text": "a"}]', "line 1 is not a JSON object; .*jq -c"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "a', "line 2 is not a JSON object"),
    "other.jsonl": (b'{"content": "x", "id": 1}', 'no "text": .* --field one of content, id'),
    "number.jsonl": (b'{"text": 1}', 'line 1: its "text" is not a string'),
    "nulls.jsonl": (b'{"text": null}', "no text"),
    "empty.txt": (b"", "no text"),
    "latin.txt": (b"\xe9", "'utf-8' codec can't decode .*iconv -f latin1"),
    "latin.jsonl": (b'{"text": "\xe9"}', "'utf-8' codec can't decode .*iconv -f latin1"),
    "pointer.txt": (text.LFS_POINTER + b"/spec/v1\n", "is a Git LFS pointer: git lfs pull"),
}


def check_refused(path, message, monkeypatch):
    """data.py has one line for it that names it, exit code 2, and leaves no folder."""
    out = path.parent / "new" / "corpus"
    with pytest.raises(Exception) as error:
        make(monkeypatch, "--input", path, "--out", out)
    code, line = explain(error.value)
    assert code == 2
    assert re.search(message, line), line
    assert len(line.splitlines()) == 1
    assert not out.parent.exists() or not list(out.parent.iterdir())


@each_row("name", TEXTS_OF_OTHERS)
def test_what_is_no_text_of_the_three_kinds_is_refused_in_one_line(tmp_path, monkeypatch, name):
    content, message = TEXTS_OF_OTHERS[name]
    (tmp_path / name).write_bytes(content)
    check_refused(tmp_path / name, message, monkeypatch)
    if message != "no text":
        check_refused(tmp_path / name, re.escape(str(tmp_path / name)), monkeypatch)


def test_missing_package_is_named(tmp_path, monkeypatch):
    """On a machine without pyarrow."""
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ModuleNotFoundError):
        make(monkeypatch, "--input", tmp_path / "a.parquet", "--out", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def header(magic):
    """As llm.c and modded-nanogpt write it in front of 900 tokens."""
    words = np.zeros(256, np.int32)
    words[:3] = magic, 1, 900
    return words.tobytes()


FOLDERS = {  # what happens to a good folder -> what the line says
    "no meta": (lambda f: (f / "meta.json").unlink(), "no meta.json: if .*echo '{.*}' > .*/meta"),
    "no val": (lambda f: (f / "val.bin").unlink(), "no val.bin: data.py makes .*lines say how"),
    "shards": (lambda f: [path.unlink() for path in f.iterdir()], "no train.bin, val.bin, meta"),
    "old": (lambda f: (f / "train.bin").rename(f / "tokens.bin"), "of an earlier edition: make"),
    "llm.c": (lambda f: prepend(f, header(20240520)), "train.bin has a header of .*tail -c .1025"),
    "llm.c, llama 3": (lambda f: prepend(f, header(20240801)), "train.bin has a header of"),
    "pointer": (lambda f: (f / "val.bin").write_bytes(text.LFS_POINTER + b"/spec/v1\nsize 7\n"),
                "val.bin is a Git LFS pointer: git lfs pull"),
    "text": (lambda f: (f / "train.bin").write_text("naïve words\n" * 999), "train.bin is text"),
    "short text": (lambda f: (f / "train.bin").write_text("word"), "train.bin is text"),
    "empty": (lambda f: (f / "val.bin").write_bytes(b""), "val.bin: .*empty"),
    "half a token": (lambda f: prepend(f, b"x"), "train.bin: .*multiple of the data-type size"),
    "cut meta": (lambda f: (f / "meta.json").write_text("{"), "meta.json must be like {"),
    "list": (lambda f: (f / "meta.json").write_text("[]"), "meta.json must be like {"),
    "dtype": (lambda f: change(f, dtype="int64"), "meta.json must be like {"),
    "vocabulary": (lambda f: change(f, vocab_size=None), "meta.json must be like {"),
    "tokenizer": (lambda f: change(f, tokenizer="gpt3"), "meta.json must be like {"),
    "few": (lambda f: change(f, vocab_size=900), "token 999, but its vocabulary has 900 tokens"),
    "short": (lambda f: RAMP[:16].tofile(f / "val.bin"), "900 tokens for training and 16 for"),
}  # fmt: skip


def prepend(folder, content):
    path = folder / "train.bin"
    path.write_bytes(content + path.read_bytes())


def change(folder, **values):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | values))


@each_row("case", FOLDERS)
def test_what_is_no_corpus_is_refused_in_one_line(tmp_path, case):
    spoil, message = FOLDERS[case]
    folder = write_folder(tmp_path / "folder", RAMP[:900], RAMP[900:])
    assert ids(data.load(folder, block_size=16)) == RAMP.tolist()
    spoil(folder)
    with pytest.raises(UserError) as error:
        data.load(folder, block_size=16)
    assert re.search(message, str(error.value)), error.value
    assert str(folder) in str(error.value) or case in ("few", "short")
    assert "\n" not in str(error.value)


def test_wrong_token_far_from_the_beginning_is_refused_when_a_batch_has_it(tmp_path):
    train = np.zeros(data.CHECKED_TOKENS + 100, np.uint16)
    train[-50:] = 300
    folder = write_folder(tmp_path / "folder", train, RAMP[:100], vocab_size=257)
    batches = data.Batches(data.load(folder), 8, 2)
    with pytest.raises(UserError, match="contains token 300, but its vocabulary has 257"):
        batches.windows(batches.corpus.train, np.array([len(train) - 20]))


def test_vocabulary_may_be_padded_and_cut_to_the_tokens_that_are_used(tmp_path):
    folder = write_folder(tmp_path / "folder", RAMP[:50], RAMP[50:100])
    for vocab_size in 320, 100:
        assert data.load(folder, vocab_size).vocab_size == vocab_size
    for name, used in (folder, 100), (None, 257):
        with pytest.raises(UserError, match=f"contains token {used - 1}, .* has {used - 1} tokens"):
            data.load(name, used - 1)


def test_hash_of_a_corpus_changes_with_its_ends_and_its_length(tmp_path):
    zeros = np.zeros(2**20 + 9, np.uint16)
    pairs = [(RAMP, RAMP), (RAMP[1:], RAMP), (RAMP, RAMP[:-1]), (zeros, RAMP), (zeros[:-1], RAMP)]
    hashes = set()
    for k, (train, val) in enumerate(pairs):
        folder = write_folder(tmp_path / str(k), train, val)
        hashes |= {data.load(folder).hash, data.load(folder).hash}
    assert len(hashes) == 5


# ---- the lines that make corpora of other programs' files ----

LINES = {}  # the first words of a comment in data.py -> the line below it, or two
for block in re.split(r"\n    # ", data.__doc__)[1:]:
    comment, *lines = block.split("\n\n")[0].splitlines()
    LINES[" ".join(re.findall(r"[\w.]+", comment)[:2])] = "\n".join(lines)
NANOGPT, LLM_C, MEGATRON, TEXT, PACKED, ARRAY, NUMPY, TABLE = LINES.values()


def shell(line, folder):
    subprocess.run(["sh", "-ec", line], cwd=folder, check=True)


def test_folder_of_nanogpt_needs_only_the_line_for_meta_json(tmp_path):
    for name, part in ("train", RAMP[:900]), ("val", RAMP[900:]):
        part.tofile(tmp_path / f"{name}.bin")
    shell(NANOGPT, tmp_path)
    corpus = data.load(tmp_path)
    assert ids(corpus) == RAMP.tolist() and len(corpus.train) == 900
    assert (corpus.vocab_size, corpus.tokenizer, corpus.eot_token) == (50257, "gpt2", 50256)
    assert json.loads((tmp_path / "meta.json").read_text()) == json.loads(data.NANOGPT)


def test_shards_of_llm_c_become_a_corpus_by_the_line_for_them(tmp_path):
    for name, part in ("train_1", RAMP[:7]), ("train_2", RAMP[7:900]), ("val_0", RAMP[900:]):
        content = header(20240520) + part.tobytes()
        (tmp_path / f"fineweb_{name}.bin").write_bytes(content)
    shell(LLM_C, tmp_path)
    shell(NANOGPT, tmp_path)
    assert data.load(tmp_path).train.tolist() == RAMP[:900].tolist()
    assert data.load(tmp_path).val.tolist() == RAMP[900:].tolist()


def test_files_of_megatron_become_a_corpus_by_the_line_for_them(tmp_path):
    large = np.array([100_000, 5, 7], np.int32)
    for name in "train", "val":
        large.tofile(tmp_path / f"x_{name}.bin")
    shell(MEGATRON, tmp_path)
    (tmp_path / "meta.json").write_text('{"dtype": "uint32", "vocab_size": 100277}')
    assert data.load(tmp_path).train.tolist() == large.tolist()


def python(line, folder, monkeypatch, **names):
    """With the imports that data.py's docstring names."""
    monkeypatch.chdir(folder)
    exec("import csv, json, numpy as np; csv.field_size_limit(2**31 - 1)\n" + line.strip(), names)


def test_npy_file_becomes_a_corpus_by_the_line_for_it(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", RAMP.astype(np.int64))
    python(NUMPY, tmp_path, monkeypatch, n=100)
    shell(NANOGPT, tmp_path)
    assert ids(data.load(tmp_path)) == RAMP.tolist() and len(data.load(tmp_path).val) == 100


DOCUMENTS = ["naïve\r\n\tπ 🙂", 'a "quoted", word', "x" * 200_000]


def test_tables_arrays_packed_and_other_text_are_read_after_their_lines(tmp_path, monkeypatch):
    rows = [{"id": str(i), "text": document} for i, document in enumerate(DOCUMENTS)]
    expected = [(document, True) for document in DOCUMENTS]
    with open(tmp_path / "x.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["id", "text"])
        table.writeheader()
        table.writerows(rows)
    python(TABLE, tmp_path, monkeypatch)
    found = [word.replace("\r\n", "\n") for word, _ in data.text_documents([tmp_path / "x.jsonl"])]
    assert found == [document.replace("\r\n", "\n") for document in DOCUMENTS]

    lines = (tmp_path / "x.jsonl").read_bytes()
    (tmp_path / "x.jsonl").unlink()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines))
    shell(PACKED.split(";")[0], tmp_path)
    assert (tmp_path / "x.jsonl").read_bytes() == lines

    for name in "a.md", "b.py":
        (tmp_path / name).write_text(name)
    shell(TEXT, tmp_path)
    assert list(data.text_documents([tmp_path / "x.txt"])) == [("a.mdb.py", True)]

    if shutil.which("jq"):
        (tmp_path / "x.json").write_text(json.dumps(rows, indent=1))
        shell(ARRAY, tmp_path)
        assert list(data.text_documents([tmp_path / "x.jsonl"])) == expected


# ---- tokenizers ----


def test_without_a_network_the_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", None)  # calling it raises an error
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR.*--tokenizer byte"):
        tokenizer.make_tokenizer("gpt2")


def test_gpt2_has_the_tokens_of_tiktoken_and_its_end_of_text_in_a_text_is_text(
    tmp_path, monkeypatch
):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b" a": 256, b"ab": 257}
    pattern = openai_public.r50k_pat_str
    own = tiktoken.Encoding(
        "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258}
    )
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", lambda name: own)
    texts = ["ab a  ab", "<|endoftext|>", "é漢 \n\n", "x" * 70_000]
    data.write_corpus([(each, True) for each in texts], "gpt2", tmp_path / "out")
    expected = []
    for each in texts:
        expected += [*own.encode_ordinary(each), 258]
        made = tokenizer.make_tokenizer("gpt2").encode(each)
        assert made.tolist() == own.encode_ordinary(each)
    corpus = data.load(tmp_path / "out")
    assert ids(corpus) == expected and expected.count(258) == 4
    assert (corpus.tokenizer, corpus.vocab_size, corpus.eot_token) == ("gpt2", 259, 258)


def test_bytes_become_tokens_and_text_again_even_if_they_are_damaged():
    byte = tokenizer.make_tokenizer("byte")
    words = "naïve\r\n\tπ 🙂 <|endoftext|>"
    assert byte.encode(words).tolist() == list(words.encode()) and byte.encode("").tolist() == []
    assert byte.decode(byte.encode(words).tolist()) == words
    assert byte.decode([0xC3, 97]) == "\ufffda"
    assert byte.encode("a\udcff").tolist() == [97, 63]  # of a command line that is not UTF-8


# ---- a corpus is whole or does not exist ----


def started(folder):
    """data.py that waits for text."""
    os.mkfifo(folder / "in.txt")
    argv = [sys.executable, ROOT / "data.py", "--input", "in.txt", "--out", "out"]
    return subprocess.Popen(argv, cwd=folder)


@each_row("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_program_leaves_nothing_that_is_taken_for_a_corpus(tmp_path, number):
    process = started(tmp_path)
    with open(tmp_path / "in.txt", "w") as pipe:
        pipe.write("some words")
        pipe.flush()
        while not list(tmp_path.glob("out.partial-*/train.bin")):
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(number)
        code = process.wait(300)
    left = [path for path in tmp_path.iterdir() if path.name != "in.txt"]
    if number == signal.SIGKILL:
        assert len(left) == 1 and left[0].name.startswith("out.partial-")
        with pytest.raises(UserError, match="no meta.json"):
            data.load(left[0])
    else:
        assert (code, left) == (128 + number, [])


PEAK = """
import sys
import data

sys.argv[1:] = ["--input", sys.argv[1], "--out", sys.argv[2]]
data.main()
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print("peak", int(peak.split()[1]) // 1024)
"""


def peak_mb(path) -> int:
    """Of data.py on this file."""
    command = [sys.executable, "-c", PEAK, path, path.with_suffix(".corpus")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.split("peak ")[1])


def write_large(folder, suffix, mb):
    """A file of one kind with so many megabytes of text: one line, many lines, one row group."""
    path = folder / f"{mb}{suffix}"
    document = "abcdefgh " * 512
    documents = [document] * (mb * 2**20 // len(document))
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": documents}), path, use_dictionary=False)
    elif suffix == ".jsonl":
        line = json.dumps({"text": document}) + "\n"
        path.write_text(line * len(documents))
    else:
        path.write_text("".join(documents))
    return path


@pytest.mark.slow
@each_row("suffix", [".txt", ".jsonl", ".parquet"])
def test_memory_does_not_grow_with_the_input(tmp_path, suffix):
    small, large = [peak_mb(write_large(tmp_path, suffix, mb)) for mb in (8, 72)]
    assert large < small + 25  # of 64 MB more
