"""Text -> token file -> batches.

A corpus is one flat array of token ids; its last few percent are the validation part:

    tokens  [ ........................ train ........................ | . validation . ]
                                                                      ^ meta.json: train_tokens

On disk it is a folder with `tokens.bin` (uint16, or uint32 for large vocabularies) and `meta.json`;
the file is memory-mapped, so its size costs no memory. The built-in corpus needs no file: it is the
source text of the standard library of the Python that runs this, about 12 MB, read in well under a
second; a stable hash of its path puts about one file in twenty into the validation part.

Which windows a rank reads is a pure function of (seed, step, micro-step, rank): a counter-based
generator (Philox) draws the starts of *all* windows of a global step, and each rank takes its rows.

    rows of a global step   [ micro-step 0: rank 0 | rank 1 | ... ][ micro-step 1: rank 0 | ... ]
                              batch_size rows each

So nothing needs saving to resume, and the global batch of a step does not depend on the mesh.

    python data.py --input book.txt more.jsonl --tokenizer byte --out my_corpus
    # needs `datasets`
    python data.py --dataset fineweb-edu --max_tokens 1e9 --tokenizer gpt2 --out fineweb
    torchrun ... train.py --data my_corpus

Input is UTF-8: a .jsonl file has one document a line, in its field `text`; any other file is one
document. Each document ends with the tokenizer's end-of-text token.
"""

import hashlib
import json
import mmap
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch

from flags import Parser, UserError

VALIDATION_FRACTION = 0.05
VALIDATION_ROWS = 16  # windows per validation batch, whatever the training batch is


def tokenizer(name: str) -> tiktoken.Encoding:
    """`byte` (256 bytes and end-of-text, works offline) or `gpt2` (tiktoken downloads it once)."""
    if name == "byte":
        return tiktoken.Encoding(
            "byte",
            pat_str=r"[\s\S]{1,64}",  # short pieces keep tiktoken's merge loop linear
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    if name != "gpt2":
        raise UserError(f"tokenizer {name!r} is unknown: use byte or gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests raises many kinds; all mean that the download failed
        raise UserError(
            f"cannot download the gpt2 vocabulary ({type(error).__name__}): connect once, point "
            "TIKTOKEN_CACHE_DIR at a folder that has it, or use --tokenizer byte"
        ) from None


@dataclass
class Corpus:
    tokens: np.ndarray  # flat token ids; a memory map if it comes from a folder
    train_tokens: int  # the first so many are for training, the rest for validation
    tokenizer: str
    vocab_size: int
    bytes_per_token: float  # bytes of text per token: turns nats per token into bits per byte
    hash: str  # of all tokens: the same corpus everywhere, or not

    @property
    def train(self):
        return self.tokens[: self.train_tokens]

    @property
    def validation(self):
        return self.tokens[self.train_tokens :]


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    return encoding.encode_to_numpy(text, disallowed_special=())


def standard_library() -> Corpus:
    """The built-in corpus: the .py files of Python's standard library, byte tokens."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
    train, validation = [], []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            key = path.relative_to(root).as_posix()
            digest = hashlib.sha256(key.encode()).digest()
            (validation if digest[0] < 256 * VALIDATION_FRACTION else train).append((key, path))
    encoding = tokenizer("byte")

    def read(files):  # sorted: the file system's order must not matter
        for _, path in sorted(files):
            try:
                text = path.read_bytes().decode("utf-8", errors="replace")
            except OSError:  # a broken link, say
                continue
            yield encode(encoding, text + "\n").astype(np.uint16)
            yield np.array([encoding.eot_token], np.uint16)

    parts = list(read(train))
    train_tokens = sum(map(len, parts))
    parts += read(validation)
    if not parts:
        raise UserError(f"no .py files in {root}: give text with --data (made by data.py)")
    tokens = np.concatenate(parts)
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    return Corpus(tokens, train_tokens, "byte", encoding.n_vocab, 1.0, digest)


def load(folder: str | None) -> Corpus:
    """Open a corpus folder (None: the built-in corpus).
    Raises UserError if it is missing or damaged."""
    if folder is None:
        return standard_library()
    path = Path(folder)
    if not path.is_dir():
        raise UserError(
            f"--data {folder}: no such folder; "
            f"make one with python data.py --input ... --out {folder}"
        )
    try:
        meta = json.loads((path / "meta.json").read_text())
        dtype = np.dtype({"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]])
        count = int(meta["tokens"])
        size = (path / "tokens.bin").stat().st_size
        fields = (int(meta["train_tokens"]), str(meta["tokenizer"]), int(meta["vocab_size"]))
        fields += (float(meta["bytes_per_token"]), str(meta["hash"]))
        with open(path / "tokens.bin", "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(
            f"--data {folder}: not a corpus of data.py ({error!r}); make it again"
        ) from None
    if size != count * dtype.itemsize or size == 0:
        raise UserError(
            f"--data {folder}: tokens.bin has {size:,} bytes where meta.json promises "
            f"{count * dtype.itemsize:,}; it is damaged, make it again"
        )
    # reading ahead costs milliseconds a batch where windows lie anywhere
    mapped.madvise(mmap.MADV_RANDOM)
    return Corpus(np.frombuffer(mapped, dtype), *fields)


def check_windows(corpus: Corpus, block_size: int):
    """Raise UserError unless both parts hold at least
    one window of block_size tokens and its targets."""
    for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
        if len(tokens) <= block_size:
            raise UserError(
                f"the {part} part of the corpus has {len(tokens):,} tokens, "
                f"a window needs {block_size + 1:,}: give it more text or lower --block_size"
            )


def windows(tokens: np.ndarray, starts: np.ndarray, block_size: int):
    """Inputs and targets, int64 (rows, block_size) each, of the windows that begin at `starts`."""
    rows = tokens[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    rows = torch.from_numpy(rows)
    return rows[:, :-1], rows[:, 1:]


def train_batch(corpus, seed, step, micro_step, rank, world_size, batch_size, accum, block_size):
    """The windows that `rank` trains on in micro-step `micro_step` of `step`: (inputs, targets)."""
    philox = np.random.Philox(key=seed, counter=[0, 0, 0, step])
    starts = np.random.Generator(philox).integers(
        0, corpus.train_tokens - block_size, size=(accum, world_size, batch_size)
    )
    return windows(corpus.tokens, starts[micro_step, rank], block_size)


def validation_batches(corpus, eval_batches, rank, world_size, batch_size, block_size):
    """This rank's share of the validation windows: yields (inputs, targets, rows that count).

    The windows, eval_batches * VALIDATION_ROWS of them, are spread evenly over the
    validation part: they do not depend on seed, batch or mesh. Every rank gets equally
    many batches, because a sharded forward is a collective; a rank that runs out of
    windows gets one that counts for 0 rows.
    """
    total = eval_batches * VALIDATION_ROWS
    starts = np.linspace(0, len(corpus.validation) - block_size - 1, total).astype(np.int64)
    share = -(-total // world_size)
    mine = starts[rank * share : (rank + 1) * share]
    for first in range(0, share, batch_size):
        rows = mine[first : first + batch_size]
        yield *windows(corpus.validation, rows if len(rows) else starts[:1], block_size), len(rows)


# ---- making a corpus folder ----


def text_documents(paths):
    """Yield each document as an iterable of pieces of text.
    Raises UserError for what cannot be read."""
    for path in map(Path, paths):
        if path.suffix != ".jsonl":
            yield ("".join(lines) for lines in read_lines(path, 1 << 24))
            continue
        lines = (line for lines in read_lines(path, 1 << 20) for line in lines)
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield [jsonl_text(path, number, line)]


def read_lines(path, at_least: int):
    """Yield lists of whole lines, of at least so many characters but at the end."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            while lines := file.readlines(at_least):
                yield lines
    except OSError as error:
        raise UserError(f"--input {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"--input {path}: not UTF-8 text; convert it first (iconv -t utf-8)"
        ) from None


def jsonl_text(path, number, line) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()  # a lone surrogate is no text
        return text
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f'--input {path}: line {number} is not a JSON object with a string "text"'
        ) from None


def fineweb_documents():
    """The paper's corpus, streamed: HuggingFaceFW/fineweb-edu, sample-10BT
    (needs `pip install datasets`)."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "--dataset fineweb-edu needs one more package: pip install datasets"
        ) from None
    try:
        rows = datasets.load_dataset(
            "HuggingFaceFW/fineweb-edu", name="sample-10BT", split="train", streaming=True
        )
        for row in rows:
            yield [row["text"]]
    except Exception as error:  # the hub's errors have no common class
        raise UserError(
            f"--dataset fineweb-edu: the download failed ({type(error).__name__}); "
            "check the network, or give local text with --input"
        ) from None


def write_corpus(
    documents, tokenizer_name: str, out: str, max_tokens: float = float("inf")
) -> dict:
    """Tokenize `documents` into the new folder `out`,
    whole or not at all; returns what meta.json says."""
    encoding = tokenizer(tokenizer_name)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 1 << 16 else np.uint32)
    out, partial = Path(out), Path(f"{out}.partial-{os.getpid()}")
    if out.exists():
        raise UserError(f"--out {out} is there already: name a new folder or remove that one")
    digest, text_bytes, count = hashlib.sha256(), 0, 0
    try:
        partial.mkdir(parents=True)
        with open(partial / "tokens.bin", "wb") as file:
            for document in documents:
                written = 0
                for piece in document:
                    written += append(file, digest, encode(encoding, piece).astype(dtype))
                    text_bytes += len(piece.encode())
                if written:
                    count += written + append(file, digest, np.array([encoding.eot_token], dtype))
                if count >= max_tokens:
                    break
        if count == 0:
            raise UserError("the input has no text: nothing was written")
        meta = {
            "tokenizer": tokenizer_name,
            "vocab_size": encoding.n_vocab,
            "dtype": dtype.name,
            "tokens": count,
            "train_tokens": int(count * (1 - VALIDATION_FRACTION)),
            "bytes_per_token": text_bytes / count,
            "hash": digest.hexdigest()[:16],
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        partial.rename(out)
        return meta
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}; nothing was written") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def append(file, digest, tokens) -> int:
    file.write(tokens.tobytes())
    digest.update(tokens.tobytes())
    return len(tokens)


def main():
    parser = Parser(description="Turn text into a corpus folder for train.py --data.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", nargs="+", metavar="FILE", help=".jsonl (field text) or plain UTF-8 text"
    )
    source.add_argument(
        "--dataset", choices=["fineweb-edu"], help="streamed through the `datasets` package"
    )
    parser.add_argument("--tokenizer", choices=["byte", "gpt2"], default="byte")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--max_tokens", type=float, default=float("inf"), help="stop after so many tokens"
    )
    try:
        args = parser.parse_args()
        if not args.max_tokens > 0:
            raise UserError(f"--max_tokens {args.max_tokens}: must be above 0")
        documents = text_documents(args.input) if args.input else fineweb_documents()
        meta = write_corpus(documents, args.tokenizer, args.out, args.max_tokens)
    except UserError as error:
        print(f"data.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(
        f"{args.out}: {meta['tokens']:,} tokens ({args.tokenizer}), "
        f"{meta['train_tokens']:,} of them for training"
    )


if __name__ == "__main__":
    main()
