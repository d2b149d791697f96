"""Text in files -> the folder of a corpus (see data.py).

    files --read--> documents, in pieces --tokenize, a batch at a time--> train.bin, val.bin

Nothing is held whole but a line of a .jsonl, so memory does not grow with the input.

A hash of how a document begins decides whether it is for validation. So a document stays in its
part when files are added, and two equal documents are in the same part.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from config import STOPS, UserError
from plumbing.tokenizer import make_tokenizer

VALIDATION_FRACTION = 0.05
FEW_DOCUMENTS = 40  # a hash would choose none of fewer in one case of eight
PIECE = 2**16  # characters of a text that are tokenized together; a longer line may be cut
BATCH = 2**20  # characters that are in memory as tokens, at least
LFS_POINTER = b"version https://git-lfs"  # what git leaves of a file without the program git-lfs
UTF8 = "text must be UTF-8: convert it, for example with iconv -f latin1 -t utf-8"

# ---- reading ----


def text_documents(paths, field: str = "text"):
    """Yield (piece of text, does its document end there?). field: of .jsonl and .parquet. Raises
    OSError if a file is missing, UserError for other wrong input."""
    readers = {".txt": read_text, ".jsonl": read_json_lines, ".parquet": read_parquet}
    for path in paths:
        with open(path, "rb") as file:
            suffix = Path(path).suffix.lower()
            if suffix not in readers:
                raise UserError(
                    f"--input {path}: not a .txt, .jsonl or .parquet: the head of data.py says how "
                    "other formats become one of these"
                )
            if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
                raise UserError(f"--input {path} is a Git LFS pointer: git lfs pull")
            try:
                yield from readers[suffix](file, field)
            except ModuleNotFoundError:
                raise
            except UnicodeDecodeError as error:
                raise UserError(f"--input {path}: {error}; {UTF8}") from None
            except Exception as error:  # damaged files raise many kinds
                reason = " ".join(str(error).split())
                raise UserError(f"--input {path}: {reason}") from None


def read_text(file, field: str):
    """The file is one document. Its pieces end with a line, if that is not too long."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # without a byte order mark
    piece = text.read(PIECE) + text.readline(PIECE)
    while piece:
        following = text.read(PIECE) + text.readline(PIECE)
        yield piece, not following
        piece = following


def read_json_lines(file, field: str):
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            raise
        except ValueError:
            row = None
        if not isinstance(row, dict):
            hint = "a JSON array becomes such lines with jq -c '.[]'"
            raise ValueError(f"line {number} is not a JSON object; {hint}")
        if field not in row:
            names = ", ".join(list(row)[:9])
            raise ValueError(f'line {number} has no "{field}": choose with --field one of {names}')
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise ValueError(f'line {number}: its "{field}" is not a string')
        if text:
            yield replace_surrogates(text), True


def read_parquet(file, field: str):
    from pyarrow.parquet import ParquetFile

    rows = ParquetFile(file, buffer_size=2**20, pre_buffer=False)  # not a whole row group
    columns = rows.schema_arrow.names
    if field not in columns:
        names = ", ".join(columns[:9])
        raise ValueError(f'no column is "{field}": choose with --field one of {names}')
    for batch in rows.iter_batches(64, columns=[field]):
        for text in filter(None, batch[field].to_pylist()):
            if not isinstance(text, str):
                raise ValueError(f'its column "{field}" has no strings')
            yield text, True


def replace_surrogates(text: str) -> str:
    """Half of a surrogate pair, as of an emoji that was cut in two, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- writing ----


@contextmanager
def new_folder(out: str):
    """Yields the path of a folder that becomes `out` at the end, or is removed after an error or
    a signal. Raises UserError if there is an `out` already."""
    out = Path(out)
    if os.path.lexists(out):
        raise UserError(f"--out {out} exists already: name a new folder or remove that one")
    partial = Path(f"{out}.partial-{os.getpid()}")
    before = {}
    for number in STOPS:  # else they would end the process at once
        if signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def is_validation(key: bytes) -> bool:
    """About one of twenty, always the same ones."""
    return hashlib.sha256(key).digest()[0] / 256 < VALIDATION_FRACTION


def tokenize(documents, tokenizer):
    """Yield (piece of text, does its document end there?, its tokens)."""
    for batch in batches(documents):
        found = tokenizer.encode_batch([text for text, _ in batch])
        for (text, ends), tokens in zip(batch, found, strict=True):
            yield text, ends, tokens


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


def write_corpus(documents, tokenizer_name: str, out: str):
    """Tokenize `documents` into the new folder `out`, whole or not at all. tokenizer_name: byte,
    gpt2, or a folder with a tokenizer.json. Raises OSError, UserError."""
    name = tokenizer_name
    if name not in ("byte", "gpt2"):
        # Bytes that are not UTF-8 become characters that the tokenizer refuses.
        name = Path(name, "tokenizer.json").read_text("utf-8", "surrogateescape")
    tokenizer = make_tokenizer(name)
    dtype = np.dtype(np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32)

    with new_folder(out) as folder:
        train, val = folder / "train.bin", folder / "val.bin"
        count = 0  # of documents
        text_bytes = 0
        with open(train, "wb") as train_file, open(val, "wb") as val_file:
            file = None  # of the document that has begun
            for text, ends, tokens in tokenize(documents, tokenizer):
                content = text.encode()
                text_bytes += len(content)
                if file is None:
                    count += 1
                    file = val_file if is_validation(content) else train_file
                    file.write(np.array(tokenizer.begin, dtype))
                file.write(np.array(tokens, dtype))
                if ends:
                    file.write(np.array([tokenizer.eot_token], dtype))
                    file = None
        if text_bytes == 0:
            raise UserError("the input has no text: nothing was written")

        sizes = [path.stat().st_size for path in (train, val)]
        if count < FEW_DOCUMENTS or 0 in sizes:
            split_at_the_end(train, val, dtype.itemsize)
        meta = {
            "dtype": dtype.name,
            "vocab_size": tokenizer.n_vocab,
            "tokenizer": tokenizer.name,
            "eot_token": tokenizer.eot_token,
            "bytes_per_token": text_bytes * dtype.itemsize / sum(sizes),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if tokenizer.name == "tokenizer.json":
            (folder / "tokenizer.json").write_text(name, "utf-8")


def split_at_the_end(train: Path, val: Path, width: int):
    """The last 5% of all tokens become the validation part. width: bytes of a token."""
    with open(train, "r+b") as first, open(val, "r+b") as second:
        first.seek(0, os.SEEK_END)
        shutil.copyfileobj(second, first)
        cut = int(first.tell() // width * (1 - VALIDATION_FRACTION)) * width
        second.seek(0)
        second.truncate()
        first.seek(cut)
        shutil.copyfileobj(first, second)
        first.truncate(cut)
