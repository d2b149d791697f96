"""Text -> token file -> batches.

A corpus is one flat array of token ids. Its last few percent are the validation part:

    tokens  [ ........................ train ........................ | . validation . ]
                                                                      ^ train_tokens

Three kinds of corpora:

    (none given)    the source text of the running Python's standard library, about 12 MB, as bytes.
                    A hash of each file's path puts about one file in twenty into the validation
                    part.
    a folder        made by this program from text. `tokens.bin` has the token ids of one document
                    after the other, uint16, or uint32 for a vocabulary above 65536. `meta.json` has
                    tokenizer, vocab_size, dtype, tokens (their number), train_tokens,
                    bytes_per_token (of text) and hash (of the tokens).
    token files     of nanoGPT (no header), llm.c and modded-nanogpt (a header), or folders of them.
                    Files without a header are uint16, or uint32 with a --vocab_size above 65536.
                    Files with the word `val` in their name are the validation part, also a val.bin
                    beside a train.bin; without any it is the last 5%.

Files are memory-mapped, never copied.

The windows of a rank are a pure function of (seed, step, micro-step, rank): a counter-based
generator (Philox) draws the starts of *all* windows of a global step, and each rank takes its rows.

    rows of a global step   [ micro-step 0: rank 0 | rank 1 | ... ][ micro-step 1: rank 0 | ... ]
                              batch_size rows each

So a checkpoint needs no state of the data, and the global batch does not depend on the mesh.

    python data.py --input book.txt more.jsonl --tokenizer byte --out my_corpus
    torchrun ... train.py --data my_corpus
    torchrun ... train.py --data train.bin --vocab_size 65       # or --data shards/*.bin

What --input reads, all of it piece by piece:

    .jsonl, .ndjson     one document per line, in its field `text`
    .parquet            one document per row, in its column `text`
    any other           text, one document
    .gz, .zst           packed .jsonl or text, for example more.jsonl.zst or book.txt.gz

Text is UTF-8. Each document ends with the tokenizer's end-of-text token. --tokenizer is byte, gpt2,
or a folder with a tokenizer.json. .parquet and .zst need the package pyarrow. (The paper's corpus,
HuggingFaceFW/fineweb-edu, is a folder of .parquet files.)
"""

import gzip
import hashlib
import io
import json
import mmap
import os
import re
import shutil
import signal
import sys
import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config import STOPS, Parser, UserError, check_limits, run_command
from plumbing.tokenizer import UNKNOWN, ByteTokenizer, make_tokenizer, read_tokenizer

VALIDATION_FRACTION = 0.05
VALIDATION_ROWS = 16  # windows per validation batch, for every training batch size
GPT2 = 50257  # tokens in its vocabulary
HINT = "name token files (.bin), or one corpus folder, made with data.py --input FILE --out DIR"
HEADERS = {20240520: np.uint16, 20240801: np.uint32}  # first number of llm.c's token files -> ids
CHECKED_TOKENS = 1_000_000  # at the beginning of each file, when a corpus is opened


# ---- corpora ----


class TokenFiles:
    """Arrays of token ids, one after the other, as one flat array."""

    def __init__(self, arrays: list):
        self.arrays = arrays
        self.begins = np.cumsum([0] + [len(array) for array in arrays])

    def __len__(self):
        return int(self.begins[-1])

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        found = np.empty(positions.shape, np.int64)
        which = np.searchsorted(self.begins, positions, side="right") - 1
        for i in np.unique(which):
            here = which == i
            found[here] = self.arrays[i][positions[here] - self.begins[i]]
        return found


@dataclass
class Corpus:
    tokens: TokenFiles
    train_tokens: int  # the first so many are for training, the rest for validation
    tokenizer: str  # the argument of make_tokenizer()
    vocab_size: int
    bytes_per_token: float  # of text: turns nats per token into bits per byte; NaN: not known
    hash: str  # of the tokens: equal on all ranks if they have the same corpus


def standard_library() -> Corpus:
    """The built-in corpus: the .py files of Python's standard library, byte tokens."""
    root = sysconfig.get_path("stdlib")
    left_out = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - left_out
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]

    tokenizer = ByteTokenizer()
    train = []
    validation = []
    # Sorted, because the order of the file system must not matter. Some links may be broken.
    for path in sorted(filter(os.path.isfile, paths)):
        text = Path(path).read_bytes().decode(errors="replace") + "\n"
        document = np.append(tokenizer.encode(text), np.uint16(tokenizer.eot_token))
        digest = hashlib.sha256(os.path.relpath(path, root).encode()).digest()
        part = validation if digest[0] / 256 < VALIDATION_FRACTION else train
        part.append(document)

    tokens = np.concatenate(train + validation)
    digest = hashlib.sha256(tokens).hexdigest()[:16]
    train_tokens = sum(map(len, train))
    return Corpus(TokenFiles([tokens]), train_tokens, "byte", tokenizer.n_vocab, 1.0, digest)


def load(data: str | None, vocab_size: int = 0) -> Corpus:
    """Open a corpus. data: a folder that data.py has made; token files, or folders of them, with
    ":" between them; or None, the built-in corpus. vocab_size: of the model, which may have more
    tokens than the corpus (0: the corpus's; of token files GPT-2's). Raises OSError if the corpus
    is missing, UserError if it is damaged or has other tokens."""
    try:
        if data is None:
            corpus = standard_library()
        elif Path(data, "meta.json").exists():
            corpus = load_folder(data)
        else:
            corpus = load_token_files(data, vocab_size or GPT2)
        corpus.vocab_size = vocab_size or corpus.vocab_size
        check_tokens(corpus)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"--data {data}: damaged ({error}); {HINT}") from None
    return corpus


def check_tokens(corpus):
    for array in corpus.tokens.arrays:
        worst = array[:CHECKED_TOKENS].max()
        if worst >= corpus.vocab_size:
            raise UserError(
                f"the corpus contains token {worst}, but its vocabulary has {corpus.vocab_size} "
                "tokens: make it again with data.py, or give a larger --vocab_size"
            )


def load_folder(folder: str) -> Corpus:
    meta = json.loads(Path(folder, "meta.json").read_text())
    array = memory_map(Path(folder, "tokens.bin"), meta.pop("dtype"))
    if len(array) != meta.pop("tokens"):
        raise ValueError(f"tokens.bin has {len(array):,} tokens")
    if meta["tokenizer"] == "tokenizer.json":
        meta["tokenizer"] = Path(folder, "tokenizer.json").read_text()
    return Corpus(TokenFiles([array]), **meta)


def load_token_files(data: str, vocab_size: int) -> Corpus:
    train = []
    validation = []
    digest = hashlib.sha256()
    for path in find_token_files(data):
        array = open_token_file(path, vocab_size)
        if re.search("(^|[^a-z])val([^a-z]|$)", path.name):  # not in "interval"
            validation.append(array)
        else:
            train.append(array)
        for piece in array[: 2**19], array[-(2**19) :]:  # all of it could take minutes
            digest.update(f"{len(array)} ".encode() + piece.tobytes())
    tokens = TokenFiles(train + validation)
    train_tokens = sum(map(len, train))
    if not validation:
        train_tokens = int(len(tokens) * (1 - VALIDATION_FRACTION))
    name = "gpt2" if vocab_size in (GPT2, 50304) else UNKNOWN  # 50304: padded
    return Corpus(tokens, train_tokens, name, vocab_size, np.nan, digest.hexdigest()[:16])


def find_token_files(data: str) -> list:
    """The paths in --data, and those of the validation files beside them."""
    paths = []
    for path in map(Path, data.split(":")):
        path.stat()  # an error that says what is wrong with it
        paths += sorted(path.glob("*.bin")) if path.is_dir() else [path]
    paths += [path.with_name(path.name.replace("train", "val")) for path in paths]
    paths = list(dict.fromkeys(path.resolve() for path in paths if path.exists()))
    wrong = not paths
    for path in paths:
        wrong |= path.suffix != ".bin" or path.with_name("meta.json").exists()
    if wrong:
        raise UserError(f"--data {data}: no token files; {HINT}")
    return paths


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Of token ids on disk."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def open_token_file(path: Path, vocab_size: int) -> np.memmap:
    """llm.c's begin with 256 int32: magic, version, number of tokens. Others have no header."""
    header = np.fromfile(path, np.int32, 256)
    if header[0] not in HEADERS:
        return memory_map(path, smallest_dtype(vocab_size))
    array = memory_map(path, HEADERS[header[0]], 1024)
    if len(array) != header[2]:
        raise ValueError(f"{path.name} has {len(array):,} tokens, its header says {header[2]:,}")
    return array


def memory_map(path, dtype, offset: int = 0) -> np.memmap:
    array = np.memmap(path, dtype, "r", offset)
    # Batches read at random positions. Reading ahead costs milliseconds per batch.
    array.base.madvise(mmap.MADV_RANDOM)
    return array


def check_windows(corpus: Corpus, block_size: int):
    """Raise UserError unless both parts have at least one window of block_size + 1 tokens."""
    train = corpus.train_tokens
    rest = len(corpus.tokens) - train
    if min(train, rest) <= block_size:
        raise UserError(
            f"the corpus has {train:,} tokens for training and {rest:,} for validation, but each "
            f"part needs at least {block_size + 1:,}: use more text or lower --block_size"
        )


# ---- batches ----


@dataclass
class Batches:
    """The batches of one rank: inputs and targets, (rows, block_size) int64 each, on its device."""

    corpus: Corpus
    block_size: int
    batch_size: int  # rows of a rank in a micro-step
    accum: int = 1  # micro-steps
    rank: int = 0
    world_size: int = 1
    seed: int = 1337
    device: torch.device = torch.device("cpu")

    def train(self, step: int, micro_step: int = 0) -> tuple:
        """(inputs, targets) of batch_size rows, at random places of the training part."""
        philox = np.random.Philox(key=self.seed, counter=[0, 0, 0, step])
        last = self.corpus.train_tokens - self.block_size
        size = (self.accum, self.world_size, self.batch_size)
        starts = np.random.Generator(philox).integers(0, last, size=size)
        return self.windows(starts[micro_step, self.rank])

    def validation(self, eval_batches: int):
        """Yield this rank's share of eval_batches * VALIDATION_ROWS windows, spread evenly over the
        validation part: (inputs, targets, rows that count). All ranks get the same number of
        batches, because a sharded forward is a collective; a rank without more windows gets one
        for 0 rows."""
        total = eval_batches * VALIDATION_ROWS
        last = len(self.corpus.tokens) - self.block_size - 1
        starts = np.linspace(self.corpus.train_tokens, last, total, dtype=int)
        share = -(-total // self.world_size)
        own = starts[self.rank * share : (self.rank + 1) * share]
        for first in range(0, share, self.batch_size):
            rows = own[first : first + self.batch_size]
            inputs, targets = self.windows(rows if len(rows) else starts[:1])
            yield inputs, targets, len(rows)

    def windows(self, starts: np.ndarray) -> tuple:
        """(inputs, targets) of the windows that begin at `starts`."""
        rows = self.corpus.tokens[starts[:, None] + np.arange(self.block_size + 1)]
        rows = torch.from_numpy(rows)
        if self.device.type == "cuda":  # pinned, so that the copy does not block the host
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]


# ---- making a corpus folder ----


def text_documents(paths):
    """Yield (piece of text, does its document end there?). Raises OSError if a file is missing,
    UserError for other wrong input."""
    for path in paths:
        with open(path, "rb") as file:
            try:
                yield from read_documents(file, str(path).lower())
            except ModuleNotFoundError:
                raise
            except Exception as error:  # damaged files raise many kinds
                raise UserError(f"--input {path}: cannot be read ({error})") from None


def read_documents(file, name: str):
    """text_documents() of one file. Its name says how to read it."""
    stem, _, suffix = name.rpartition(".")
    match suffix:
        case "gz":
            return read_documents(gzip.open(file), stem)
        case "zst":
            import pyarrow
            unpacked = pyarrow.CompressedInputStream(file, "zstd")
            return read_documents(io.BufferedReader(unpacked), stem)
        case "parquet":
            return parquet_documents(file)
        case "jsonl" | "ndjson":
            return json_documents(file)
        case "bin" | "json" | "tar":
            raise ValueError("neither text nor .jsonl (one object per line) nor .parquet")
    return text_document(file)


def text_document(file):
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")  # without a byte order mark
    # Pieces bound the memory. They end with a line, if it is not too long.
    while piece := text.read(2**20) + text.readline(2**16):
        yield piece, False
    yield "", True


def json_documents(file):
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()  # fails for half of a surrogate pair
        except Exception:
            raise ValueError(f'line {number} is not a JSON object with a string "text"') from None
        if text:
            yield text, True


def parquet_documents(file):
    from pyarrow.parquet import ParquetFile
    rows = ParquetFile(file, buffer_size=1_000_000, pre_buffer=False)  # not a whole row group
    for batch in rows.iter_batches(64, columns=["text"]):
        for text in filter(None, batch["text"].to_pylist()):
            text.encode()  # fails if it is no string
            yield text, True


@contextmanager
def new_folder(out: str):
    """Yields the path of a folder that becomes `out` at the end, or is removed after an error or
    a signal. Raises UserError if there is an `out` already."""
    out = Path(out)
    if out.exists():
        raise UserError(f"--out {out} exists already: name a new folder or remove that one")
    partial = Path(f"{out}.partial-{os.getpid()}")
    for number in STOPS:  # an exception, so that the folder is removed
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_corpus(documents, tokenizer_name: str, out: str, max_tokens: float) -> dict:
    """Tokenize `documents` into the new folder `out`, whole or not at all. Returns meta.json. Its
    vocabulary is the model's, unless the documents have a token that only the tokenizer has. Its
    bytes_per_token are those of whole pieces of text."""
    name, vocab_size = read_tokenizer(tokenizer_name)
    tokenizer = make_tokenizer(name)
    dtype = smallest_dtype(tokenizer.n_vocab)
    digest = hashlib.sha256()
    text_bytes = 0
    encoded = 0  # tokens, also those beyond max_tokens
    count = 0
    largest = 0
    with new_folder(out) as folder, open(folder / "tokens.bin", "wb") as file:
        for text, ends in documents:
            tokens = tokenizer.encode(text).astype(dtype)
            if ends:
                tokens = np.append(tokens, dtype.type(tokenizer.eot_token))
            encoded += len(tokens)
            text_bytes += len(text.encode())
            tokens = tokens[: int(min(len(tokens), max_tokens - count))]
            file.write(tokens)
            digest.update(tokens)
            count += len(tokens)
            largest = max(largest, int(tokens.max(initial=0)))
            if count >= max_tokens:
                break
        if text_bytes == 0:
            raise UserError("the input has no text: nothing was written")
        meta = {
            "tokenizer": tokenizer.name,
            "vocab_size": max(vocab_size, 1 + largest),
            "dtype": dtype.name,
            "tokens": count,
            "train_tokens": int(count * (1 - VALIDATION_FRACTION)),
            "bytes_per_token": text_bytes / encoded,
            "hash": digest.hexdigest()[:16],
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        if tokenizer.name == "tokenizer.json":
            (folder / "tokenizer.json").write_text(name)
    return meta


def main():
    parser = Parser(description="Turn text into a corpus folder for train.py --data.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="text, .jsonl, .parquet, packed: .gz, .zst")
    add("--tokenizer", default="byte", help="byte (default), gpt2, or a folder with tokenizer.json")
    add("--out", required=True, help="new folder")
    add("--max_tokens", type=float, default=1e18, help="stop at so many tokens (default: none)")
    args = parser.parse_args()
    for name in "input", "out":
        check_limits(f"--{name}", getattr(args, name), {})
    check_limits("--max_tokens", args.max_tokens, {"low": 1})
    meta = write_corpus(text_documents(args.input), args.tokenizer, args.out, args.max_tokens)
    print(f"{args.out}: {meta['tokens']:,} tokens ({args.tokenizer})")


if __name__ == "__main__":
    run_command("data.py", main)
