"""Text in files -> the folder of a corpus (see data.py, which has the list of formats).

    files --read--> documents, in pieces --tokenize on all cores--> tokens --split--> tokens.bin

The content of a file says what it is: its first bytes, and whether its first line is a JSON object.
A name that says something else, for example `.gz` of a file that is not packed, or `.jsonl` of one
that has no JSON lines, is an error.

Nothing is held whole: a text is read in pieces, and a batch of pieces is tokenized at a time.

A hash of how a document begins decides whether it is for validation. So a document stays in its
part when files are added, and two equal documents are in the same part. One long document can make
the parts far from 95% and 5%. With few documents, or if the hash leaves a part empty, validation is
the last 5% of the tokens.
"""

import codecs
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np

from config import STOPS, UserError
from plumbing.tokenizer import make_tokenizer

VALIDATION_FRACTION = 0.05
LAST = f"the last {VALIDATION_FRACTION:.0%}"  # where validation is, unless a hash chooses it
FEW_DOCUMENTS = 40  # a hash would choose none of fewer in one case of eight
PIECE = 2**16  # characters of a text that are tokenized together; a longer line may be cut
BATCH = 2**21  # characters that are in memory as tokens, at least
ZEROS = "bytes that are zero: binary, or UTF-16, which iconv -f UTF-16LE -t utf-8 converts"
UTF8 = "text must be UTF-8: convert it, for example with iconv -f latin1 -t utf-8"

# ---- reading ----

JSON_LINES = {"jsonl", "ndjson", "jsonlines"}  # .jl is also Julia's
NO_TEXT = {"bin", "npy", "json", "tar", "zip", "bz2", "xz", "7z"}  # suffixes
BEGINNINGS = {  # of files, as regular expressions
    "gz": rb"\x1f\x8b\x08[\0-\x1f]",
    "zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "parquet": rb"PAR1",
    "bz2": rb"BZh[1-9]",
    "xz": rb"\xfd7zXZ\x00",
    "zip": rb"PK\x03\x04",
    "7z": rb"7z\xbc\xaf",
    "lz4": rb"\x04\x22\x4d\x18",
    "npy": rb"\x93NUMPY",
    "json-seq": rb"\x1e\s*\{\s*[\"}]",
    "safetensors": rb"(?s).{4}\0{4}\{\"",
    "tar": rb"(?s).{257}ustar",
    "utf-16": rb"\xff\xfe(?!\0\0)|\xfe\xff",  # with two zeros it is UTF-32, or a wide token id
}


def regular_file(path: Path) -> Path:
    """This path. Raises OSError or UserError unless it is a file: a pipe would wait for ever."""
    path.stat()
    if not path.is_file():
        raise UserError(f"{path}: not a regular file")
    return path


def text_documents(paths, field: str = "text"):
    """Yield (piece of text, does its document end there?). field: of .jsonl and .parquet. Raises
    OSError if a file is missing, UserError for other wrong input."""
    for path in paths:
        if not str(path):
            raise UserError('--input "": a name is empty')
        with open(path, "rb", 2**16) as file:
            try:
                yield from read_documents(file, Path(path).name.lower(), field)
            except ModuleNotFoundError:
                raise
            except UnicodeDecodeError as error:
                raise UserError(f"--input {path}: cannot be read ({error}): {UTF8}") from None
            except Exception as error:  # damaged files raise many kinds
                reason = " ".join(str(error).split())
                raise UserError(f"--input {path}: cannot be read ({reason})") from None


def read_documents(file, name: str, field: str):
    """text_documents() of one file."""
    head = file.peek()
    stem, _, suffix = name.rpartition(".")
    kind = find_kind(head)
    if kind not in ("gz", "zst", "parquet") and suffix in ("gz", "zst", "parquet"):
        kind = suffix  # which raises an error that says what is wrong with it

    if kind == "gz":
        inner = stem if suffix == "gz" else name
        return read_documents(io.BufferedReader(gzip.open(file), 2**16), inner, field)
    if kind == "zst":
        import pyarrow

        inner = stem if suffix == "zst" else name
        unpacked = pyarrow.CompressedInputStream(file, "zstd")
        return read_documents(io.BufferedReader(unpacked, 2**16), inner, field)
    if kind == "parquet":
        if not isinstance(file.raw, io.FileIO):
            raise ValueError("a packed .parquet file: unpack it first")
        return parquet_documents(file, field)
    if kind == "utf-16":
        raise ValueError("UTF-16: convert it with iconv -f UTF-16 -t utf-8")
    if kind == "json-seq":
        raise ValueError("json-seq: make it .jsonl with tr -d '\\036' | jq -c .")
    if kind:
        raise ValueError(f"neither text nor .jsonl (one object per line) nor .parquet, but {kind}")

    begin = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if JSON_LINES & set(name.split(".")[1:]) or re.match(rb'\{\s*["}]', begin):
        return json_documents(file, field)
    if suffix in NO_TEXT or re.match(rb"\[\s*\{", begin):
        raise ValueError(
            "neither text nor .jsonl (one object per line) nor .parquet; a JSON array becomes "
            ".jsonl with jq -c '.[]'"
        )
    return text_document(file)


def find_kind(head: bytes) -> str:
    """The name of a format that is no text, or ""."""
    for kind, beginning in BEGINNINGS.items():
        if re.match(beginning, head):
            return kind
    return ""


def is_text(head: bytes) -> bool:
    """Of a file of token ids or of text: no text has bytes below 9 (a tab), of many ids some do."""
    return len(head) >= 256 and min(head) >= 9


def text_document(file):
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # without a byte order mark
    # Pieces bound the memory. They end with a line, if it is not too long.
    empty = True
    while piece := text.read(PIECE) + text.readline(PIECE):
        if "\0" in piece:
            raise ValueError(f"it has {ZEROS}")
        yield piece, False
        empty = False
    if not empty:
        yield "", True


def json_documents(file, field: str):
    for number, line in enumerate(file, 1):
        if not line.removeprefix(codecs.BOM_UTF8).strip():
            continue
        text = read_field(line, number, field)
        if text:  # not null and not empty
            yield text, True


def read_field(line: bytes, number: int, field: str) -> str | None:
    if b"\0" in line:
        raise ValueError(f"line {number} has {ZEROS}")
    wrong = f'line {number} is not a JSON object with a string "{field}"'
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"line {number}: {error}; {UTF8}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{wrong}: write one object per line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{wrong}: write one object per line")
    if field not in row:
        raise ValueError(f"{wrong}: choose with --field one of {', '.join(list(row)[:9])}")
    text = row[field]
    if text is None:
        return None
    try:
        text.encode()  # fails for half of a surrogate pair, and for what is no string
    except (AttributeError, UnicodeEncodeError):
        raise ValueError(wrong) from None
    return text


def parquet_documents(file, field: str):
    from pyarrow import types
    from pyarrow.parquet import ParquetFile

    rows = ParquetFile(file, buffer_size=1_000_000, pre_buffer=False)  # not a whole row group
    names = rows.schema_arrow.names
    if names.count(field) != 1:
        raise ValueError(f'not one column is "{field}": choose with --field one of {names[:9]}')
    kind = rows.schema_arrow.field(field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        types.is_string(kind)
        or types.is_large_string(kind)
        or str(kind) == "string_view"
        or types.is_null(kind)
    ):
        raise ValueError(f'its column "{field}" has {kind}, not strings')
    for batch in rows.iter_batches(64, columns=[field]):
        for text in filter(None, batch[field].to_pylist()):
            yield text, True


# ---- writing ----


@contextmanager
def new_folder(out: str):
    """Yields the path of a folder that becomes `out` at the end, or is removed after an error or
    a signal. Raises UserError if there is an `out` already."""
    out = Path(out)
    if os.path.lexists(out):
        raise UserError(f"--out {out} exists already: name a new folder or remove that one")
    partial = Path(f"{out}.partial-{os.getpid()}")
    with signals_raise():
        try:
            partial.mkdir(parents=True)
            yield partial
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def to_disk(path):
    """Wait until the disk has a file, or the names in a folder, where the system can do it."""
    with suppress(OSError) if path.is_dir() else nullcontext():  # Windows opens no folder
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def signals_raise():
    """A signal that would end the process at once raises an exception instead.

    Python runs a handler between two of its own steps. A signal that comes just before the process
    waits in read() would be noticed when the wait ends, which may be never. So a timer interrupts
    such waits, twice a second; Python runs the handlers and goes on waiting."""
    before = {}
    has_timer = hasattr(signal, "setitimer")  # not on Windows
    for number in STOPS:
        if signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, lambda number, frame: sys.exit(128 + number))
    if has_timer:
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda number, frame: None)
        timer = signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        yield
    finally:
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in before.items():
            signal.signal(number, handler)


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which token ids are stored on disk."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def is_validation(key: bytes) -> bool:
    """About one of twenty, always the same ones."""
    return hashlib.sha256(key).digest()[0] / 256 < VALIDATION_FRACTION


def tokenize(documents, tokenizer):
    """Yield (piece of text, its tokens, does its document end there?). While a batch is used, the
    next one is tokenized."""
    before = [], []
    for batch in batches(documents):
        started = batch, tokenizer.encode_batch([text for text, _ in batch])
        yield from pair(*before)
        before = started
    yield from pair(*before)


def batches(documents):
    batch = []
    size = 0
    for text, ends in documents:
        batch.append((text, ends))
        size += len(text)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    yield batch


def pair(batch: list, found):
    for (text, ends), tokens in zip(batch, found, strict=True):
        yield text, tokens, ends


class SplitFile:
    """The tokens of documents on their way into tokens.bin: those for training, then those for
    validation. The first documents wait until there are enough of them to be split."""

    def __init__(self, folder: Path):
        self.paths = [folder / "tokens.bin", folder / "validation.bin", folder / "waiting.bin"]
        self.files = [open(path, "w+b") for path in self.paths]
        self.waiting = []  # [part, bytes] of the documents in waiting.bin
        self.split = False  # are there enough documents?
        self.documents = [0, 0]  # of training and validation
        self.tokens = [0, 0]

    def begin(self, text: str):
        """A document begins, with this piece of text."""
        self.part = int(is_validation(text.encode()))
        self.documents[self.part] += 1
        if sum(self.documents) == FEW_DOCUMENTS:
            self.split_waiting()
        if not self.split:
            self.waiting.append([self.part, 0])

    def write(self, tokens: np.ndarray):
        self.tokens[self.part] += len(tokens)
        if self.split:
            self.files[self.part].write(tokens)
        else:
            self.files[2].write(tokens)
            self.waiting[-1][1] += tokens.nbytes

    def split_waiting(self):
        self.split = True
        self.files[2].seek(0)
        for part, count in self.waiting:
            while count:
                piece = self.files[2].read(min(count, 2**20))
                self.files[part].write(piece)
                count -= len(piece)

    def finish(self) -> tuple:
        """(number of tokens for training, where validation is)"""
        if self.split:
            self.files[1].seek(0)
            shutil.copyfileobj(self.files[1], self.files[0], 2**20)
        for file in self.files:
            file.close()
        if not self.split:
            self.paths[2].replace(self.paths[0])
        for path in self.paths[1:]:
            path.unlink(missing_ok=True)

        if self.split and all(self.tokens):
            chosen = f"{self.documents[1]:,} of {sum(self.documents):,} documents, by hash"
            return self.tokens[0], chosen
        return int(sum(self.tokens) * (1 - VALIDATION_FRACTION)), LAST


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()[:16]


def read_tokenizer(name: str) -> tuple:
    """--tokenizer -> (argument of make_tokenizer(), size of the model's vocabulary). name: byte,
    gpt2, or a folder with a tokenizer.json. The model is that of a config.json beside it. It may
    have more tokens than the tokenizer (padding) or fewer (added tokens). Raises OSError if there
    is no such folder."""
    if name in ("byte", "gpt2"):
        return name, make_tokenizer(name).n_vocab
    # Bytes that are not UTF-8 become characters that the tokenizer refuses.
    text = regular_file(Path(name, "tokenizer.json")).read_text("utf-8", "surrogateescape")
    config = Path(name, "config.json")
    if config.exists():
        regular_file(config)
        try:
            return text, int(json.loads(config.read_text())["vocab_size"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{config} has no vocab_size") from None
    return text, make_tokenizer(text).n_vocab


def write_corpus(documents, tokenizer_name: str, out: str, max_tokens: float) -> dict:
    """Tokenize `documents` into the new folder `out`, whole or not at all. Returns meta.json. Its
    vocabulary is the model's, unless the documents have a token that only the tokenizer has. Its
    bytes_per_token are those of whole pieces of text."""
    name, vocab_size = read_tokenizer(tokenizer_name)
    tokenizer = make_tokenizer(name)
    dtype = smallest_dtype(tokenizer.n_vocab)
    text_bytes = 0
    encoded = 0  # tokens, also those beyond max_tokens
    count = 0
    largest = 0
    begins = True
    with new_folder(out) as folder:
        file = SplitFile(folder)
        for text, tokens, ends in tokenize(documents, tokenizer):
            if begins:
                file.begin(text)
            before = tokenizer.begin if begins else []
            after = [tokenizer.eot_token] if ends else []
            tokens = np.concatenate([before, tokens, after]).astype(dtype)
            begins = ends
            encoded += len(tokens)
            text_bytes += len(text.encode())
            tokens = tokens[: int(min(len(tokens), max_tokens - count))]
            file.write(tokens)
            count += len(tokens)
            largest = max(largest, int(tokens.max(initial=0)))
            if count >= max_tokens:
                break
        if text_bytes == 0:
            raise UserError("the input has no text: nothing was written")
        train_tokens, validation = file.finish()
        meta = {
            "tokenizer": tokenizer.name,
            "vocab_size": max(vocab_size, 1 + largest),
            "dtype": dtype.name,
            "tokens": count,
            "train_tokens": train_tokens,
            "validation": validation,
            "bytes_per_token": text_bytes / encoded,
            "hash": hash_file(folder / "tokens.bin"),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if tokenizer.name == "tokenizer.json":
            (folder / "tokenizer.json").write_text(name, encoding="utf-8")
    return meta
