"""Text -> token file -> batches.

A corpus is one flat array of token ids. Its last few percent are the validation part:

    tokens  [ ........................ train ........................ | . validation . ]
                                                                      ^ train_tokens

On disk it is a folder with `tokens.bin` (uint16, or uint32 for large vocabularies), which is
memory-mapped, and `meta.json`. The built-in corpus is the source text of the running Python's
standard library, about 12 MB. A stable hash of each file's path puts about one file in twenty into
the validation part.

The windows of a rank are a pure function of (seed, step, micro-step, rank): a counter-based
generator (Philox) draws the starts of *all* windows of a global step, and each rank takes its rows.

    rows of a global step   [ micro-step 0: rank 0 | rank 1 | ... ][ micro-step 1: rank 0 | ... ]
                              batch_size rows each

So a checkpoint needs no state of the data, and the global batch does not depend on the mesh.

    python data.py --input book.txt more.jsonl --tokenizer byte --out my_corpus
    torchrun ... train.py --data my_corpus

Input is UTF-8. A .jsonl file has one document per line, in its field `text`; any other file is one
document. Each document ends with the tokenizer's end-of-text token. (The paper's corpus is
HuggingFaceFW/fineweb-edu; the package `datasets` can write it as .jsonl.)
"""

import hashlib
import json
import mmap
import os
import shutil
import signal
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch

from plumbing.config import STOPS, Parser, UserError, check_limits, run_command

VALIDATION_FRACTION = 0.05
VALIDATION_ROWS = 16  # windows per validation batch, for every training batch size
DOWNLOAD_S = 60
CHECKED_TOKENS = 2**24  # at the beginning of a corpus, when it is opened


def encode(encoding, text: str) -> np.ndarray:
    return encoding.encode_to_numpy(text, disallowed_special=())


def tokenizer(name: str) -> tiktoken.Encoding:
    """`byte` (256 bytes and end-of-text, works offline) or tiktoken's `gpt2` (downloaded once)."""
    if name == "byte":
        return tiktoken.Encoding(
            "byte",
            pat_str=r"[\s\S]{1,64}",  # short pieces keep tiktoken's merge loop linear
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    found, reason = [], [f"no answer in {DOWNLOAD_S} s"]

    def fetch():
        try:
            found.append(tiktoken.get_encoding(name))
        except Exception as error:  # requests raises many kinds; all mean that it failed
            reason.append(type(error).__name__)

    thread = threading.Thread(target=fetch, daemon=True)  # a firewall may never answer
    thread.start()
    thread.join(DOWNLOAD_S)
    if not found:
        raise UserError(
            f"cannot download the {name} vocabulary ({reason[-1]}): connect once, point "
            "TIKTOKEN_CACHE_DIR at a folder that has it, or use --tokenizer byte"
        )
    return found[0]


@dataclass
class Corpus:
    tokens: np.ndarray  # flat token ids; a memory map if it comes from a folder
    train_tokens: int  # the first so many are for training, the rest for validation
    tokenizer: str
    vocab_size: int
    bytes_per_token: float  # bytes of text per token: turns nats per token into bits per byte
    hash: str  # of all tokens: equal on all ranks if they have the same corpus

    def check(self, tokens):
        """Raise UserError unless all these tokens are in the vocabulary."""
        if len(tokens) and (worst := tokens.max()) >= self.vocab_size:
            raise UserError(
                f"the corpus contains token {worst}, but its vocabulary has {self.vocab_size} "
                "tokens: make it again with data.py"
            )


def standard_library() -> Corpus:
    """The built-in corpus: the .py files of Python's standard library, byte tokens."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    encoding, paths, parts = tokenizer("byte"), [], {"train": [], "validation": []}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - left_out
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    # Sorted, because the order of the file system must not matter. Some links may be broken.
    for path in sorted(filter(Path.is_file, paths), key=Path.as_posix):
        text = path.read_bytes().decode("utf-8", errors="replace")
        key = path.relative_to(root).as_posix()
        share = hashlib.sha256(key.encode()).digest()[0] / 256
        part = parts["validation" if share < VALIDATION_FRACTION else "train"]
        part.append(np.append(encode(encoding, text + "\n"), encoding.eot_token).astype(np.uint16))
    if not paths:
        raise UserError(f"no .py files in {root}: use --data FOLDER (made by data.py)")
    tokens = np.concatenate(parts["train"] + parts["validation"])
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    train_tokens = sum(map(len, parts["train"]))
    return Corpus(tokens, train_tokens, "byte", encoding.n_vocab, 1.0, digest)


def load(folder: str | None) -> Corpus:
    """Open a corpus folder (None: the built-in corpus). Raises UserError if it is missing or
    damaged."""
    if folder is None:
        return standard_library()
    try:
        meta = json.loads(Path(folder, "meta.json").read_text())
        dtype = {"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]
        tokens = np.memmap(Path(folder, "tokens.bin"), dtype, mode="r")
        corpus = Corpus(
            tokens, int(meta["train_tokens"]), str(meta["tokenizer"]), int(meta["vocab_size"]),
            float(meta["bytes_per_token"]), str(meta["hash"]),
        )  # fmt: skip
        if len(corpus.tokens) != meta["tokens"] or not 0 <= corpus.train_tokens <= meta["tokens"]:
            raise ValueError(f"tokens.bin has {len(corpus.tokens):,} tokens")
        if not 0 < corpus.bytes_per_token < np.inf:
            raise ValueError(f"meta.json has bytes_per_token {corpus.bytes_per_token}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"damaged ({str(error)[:100]})"
        hint = "make a corpus with python data.py --input FILE --out DIR"
        raise UserError(f"--data {folder[:200]}: {reason}; {hint}") from None
    corpus.check(corpus.tokens[:CHECKED_TOKENS])
    # Batches read at random positions. Reading ahead would cost milliseconds per batch.
    tokens.base.madvise(mmap.MADV_RANDOM)
    return corpus


def check_windows(corpus: Corpus, block_size: int):
    """Raise UserError unless both parts have at least one window of block_size + 1 tokens."""
    train, rest = corpus.train_tokens, len(corpus.tokens) - corpus.train_tokens
    if min(train, rest) <= block_size:
        raise UserError(
            f"the corpus has {train:,} tokens for training and {rest:,} for validation, but each "
            f"part needs at least {block_size + 1:,}: use more text or lower --block_size"
        )


def windows(corpus: Corpus, starts: np.ndarray, block_size: int):
    """Inputs and targets, int64 (rows, block_size) each, of the windows that begin at `starts`."""
    rows = corpus.tokens[starts[:, None] + np.arange(block_size + 1)]
    corpus.check(rows)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def train_batch(corpus, seed, step, micro_step, rank, world_size, batch_size, accum, block_size):
    """The batch of `rank` in micro-step `micro_step` of `step`: (inputs, targets)."""

    def starts(step):
        philox = np.random.Philox(key=seed, counter=[0, 0, 0, step])
        size, last = (accum, world_size, batch_size), corpus.train_tokens - block_size
        return np.random.Generator(philox).integers(0, last, size=size)[micro_step, rank]

    if isinstance(corpus.tokens.base, mmap.mmap):
        read_ahead(corpus, starts(step + 1), block_size)
    return windows(corpus, starts(step), block_size)


def read_ahead(corpus, starts, block_size: int):
    """Let the system read these windows in the background: a network file may be slow."""
    memory = corpus.tokens.base
    for start in starts:
        first = int(start) * corpus.tokens.itemsize
        page = first // mmap.PAGESIZE * mmap.PAGESIZE
        size = first - page + (block_size + 1) * corpus.tokens.itemsize
        memory.madvise(mmap.MADV_WILLNEED, page, size)


def validation_batches(corpus, eval_batches, rank, world_size, batch_size, block_size):
    """Yield this rank's share of eval_batches * VALIDATION_ROWS windows, spread evenly over the
    validation part: (inputs, targets, rows that count). All ranks get the same number of batches,
    because a sharded forward is a collective; a rank without more windows gets one for 0 rows."""
    total = eval_batches * VALIDATION_ROWS
    last = len(corpus.tokens) - block_size - 1
    starts = np.linspace(corpus.train_tokens, last, total).astype(np.int64)
    share = -(-total // world_size)
    mine = starts[rank * share : (rank + 1) * share]
    for first in range(0, share, batch_size):
        rows = mine[first : first + batch_size]
        yield *windows(corpus, rows if len(rows) else starts[:1], block_size), len(rows)


# ---- making a corpus folder ----


def text_documents(paths):
    """Yield (piece of text, does its document end there?). Raises UserError for wrong input."""
    for path in map(Path, paths):
        line_number = 0
        try:
            with open(path, encoding="utf-8", newline="") as file:
                if path.suffix == ".jsonl":
                    for line_number, line in enumerate(file, 1):
                        text = json.loads(line)["text"] if line.strip() else ""
                        text.encode()  # fails for half of a surrogate pair
                        if text:
                            yield text, True
                else:
                    while lines := file.readlines(2**24):  # pieces bound the memory
                        yield "".join(lines), False
                    yield "", True
        except UnicodeDecodeError:
            raise UserError(f"--input {path}: not UTF-8 text; use iconv -t utf-8") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            line = f'line {line_number} is not a JSON object with a string "text"'
            raise UserError(f"--input {path}: {line}") from None


def write_corpus(documents, tokenizer_name: str, out: str, max_tokens: float = np.inf) -> dict:
    """Tokenize `documents` into the new folder `out`, whole or not at all. Returns meta.json."""
    encoding = tokenizer(tokenizer_name)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    out = Path(os.path.abspath(out))
    if out.exists():
        raise UserError(f"--out {out} exists already: name a new folder or remove that one")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    digest, text_bytes, count = hashlib.sha256(), 0, 0
    try:
        partial.mkdir(parents=True)
        with open(partial / "tokens.bin", "wb") as file:
            for text, ends in documents:
                tokens = encode(encoding, text).astype(dtype)
                tokens = np.append(tokens, dtype.type(encoding.eot_token)) if ends else tokens
                if len(tokens) > max_tokens - count:
                    tokens = tokens[: int(max_tokens - count)]
                    text = encoding.decode(tokens.tolist(), errors="ignore")
                file.write(tokens.tobytes())
                digest.update(tokens.tobytes())
                text_bytes, count = text_bytes + len(text.encode()), count + len(tokens)
                if count >= max_tokens:
                    break
        if text_bytes == 0:
            raise UserError("the input has no text: nothing was written")
        meta = {
            "tokenizer": tokenizer_name, "vocab_size": encoding.n_vocab, "dtype": dtype.name,
            "tokens": count, "train_tokens": int(count * (1 - VALIDATION_FRACTION)),
            "bytes_per_token": text_bytes / count, "hash": digest.hexdigest()[:16],
        }  # fmt: skip
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        partial.rename(out)
        return meta
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main():
    parser = Parser(description="Turn text into a corpus folder for train.py --data.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".jsonl (field text) or text")
    add("--tokenizer", choices=["byte", "gpt2"], default="byte", help="(default: byte)")
    add("--out", required=True, metavar="DIR", help="new folder")
    add("--max_tokens", type=float, default=1e18, help="stop after so many tokens (default: none)")
    args = parser.parse_args()
    check_limits("max_tokens", args.max_tokens, {"low": 1})
    for number in STOPS:  # an exception, so that write_corpus() removes its unfinished folder
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    meta = write_corpus(text_documents(args.input), args.tokenizer, args.out, args.max_tokens)
    count, train = meta["tokens"], meta["train_tokens"]
    print(f"{args.out}: {count:,} tokens ({args.tokenizer}), {train:,} of them for training")


if __name__ == "__main__":
    run_command("data.py", main)
