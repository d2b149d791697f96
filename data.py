r"""Text -> token ids -> batches.

A corpus is two arrays of token ids, one for training and one for validation. Without --data it is
the built-in one: the source text of the running Python's standard library, about 12 MB, as bytes.
A hash of each file's path puts about one file in twenty into its validation part.

--data is a folder. This program makes it from text:

    python data.py --input book.txt more.jsonl shard.parquet --out my_corpus
    torchrun ... train.py --data my_corpus

    .txt        one document
    .jsonl      one document per line, in its field `text`, or that of --field
    .parquet    one document per row, in its column `text`, or that of --field; needs pyarrow

Text is UTF-8. A document whose text is null or empty is left out. Each document ends with the
tokenizer's end-of-text token, and begins with the token that the tokenizer puts in front of a text
(Llama's do), if there is one. --tokenizer is byte, gpt2, or a folder with a tokenizer.json. A hash
of each document puts about one in twenty into val.bin, so a new file moves none of the others. Of
fewer than 40 documents, or if the hash chooses none, val.bin is the last 5%.

The folder is that of nanoGPT and one file more:

    train.bin, val.bin    token ids, one after the other, and nothing else
    meta.json             what the ids mean:

    key in meta.json    value                                               needed for
    dtype               "uint16" or "uint32"                                always
    vocab_size          how many tokens there are                           always
    tokenizer           "byte", "gpt2", or "tokenizer.json" (a file here)   samples, --init_from
    eot_token           the id that ends a document                         --data_by_replica
    bytes_per_token     of text                                             bits per byte in the log

No other format is read, and none is guessed: each of the usual ones becomes one of these by a line
of its own. In a shell:

    # nanoGPT's folder (that of shakespeare_char needs only the dtype, and the vocab_size 65)
    echo '{"dtype": "uint16", "vocab_size": 50257,
           "tokenizer": "gpt2", "eot_token": 50256}' > meta.json
    # shards of llm.c and modded-nanogpt: 1,024 bytes in front of the ids; then nanoGPT's meta.json
    tail -q -c +1025 *_train_*.bin > train.bin; tail -q -c +1025 *_val_*.bin > val.bin
    # x.bin beside x.idx of Megatron and NeMo: uint16, or uint32 if there are above 65,500 tokens
    cp x_train.bin train.bin; cp x_val.bin val.bin
    # text with other suffixes, as one document
    cat *.md *.py > x.txt
    # packed text
    gunzip x.jsonl.gz; zstd -d y.jsonl.zst
    # a JSON array
    jq -c '.[]' x.json > x.jsonl

In Python (import csv, json, numpy as np; csv.field_size_limit(2**31 - 1)):

    # .npy, the last n ids for validation; for ids of 8 bytes x = np.fromfile("x.bin", "int64") ...
    x = np.load("x.npy").astype("uint16"); x[:-n].tofile("train.bin"); x[-n:].tofile("val.bin")
    # a table
    open("x.jsonl", "w").writelines(json.dumps(r) + "\n" for r in csv.DictReader(open("x.csv")))

The windows of a rank are a pure function of (seed, step, micro-step, rank): a counter-based
generator (Philox) draws the starts of *all* windows of a global step, and each rank takes its rows.

    rows of a global step   [ micro-step 0: rank 0 | rank 1 | ... ][ micro-step 1: rank 0 | ... ]
                              batch_size rows each

So a checkpoint needs no state of the data, and the global batch does not depend on the mesh. (With
--data_by_replica it does: each replica draws from documents of its own.)
"""

import codecs
import dataclasses
import hashlib
import json
import os
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from config import Parser, UserError, check_limits, run_command
from plumbing.text import LFS_POINTER, is_validation, text_documents, write_corpus
from plumbing.tokenizer import UNKNOWN, ByteTokenizer

VALIDATION_ROWS = 16  # windows per validation batch, for every training batch size
CHECKED_TOKENS = 1_000_000  # at the beginning of each part, when a corpus is opened; then batches
HEADERS = (20240520, 20240801)  # the first int32 in files of llm.c and modded-nanogpt
NANOGPT = '{"dtype": "uint16", "vocab_size": 50257, "tokenizer": "gpt2", "eot_token": 50256}'


# ---- corpora ----


@dataclass
class Corpus:
    train: np.ndarray  # token ids; those of a folder are memory-mapped, never copied
    val: np.ndarray
    vocab_size: int
    hash: str  # of the tokens: equal on all ranks if they have the same corpus
    tokenizer: str = UNKNOWN  # the argument of make_tokenizer()
    eot_token: int | None = None  # None: not known
    bytes_per_token: float = np.nan  # of text: turns nats per token into bits per byte
    cuts: list | None = None  # replica i reads the training part from cuts[i] to cuts[i + 1]

    def __len__(self):
        return len(self.train) + len(self.val)

    def describe(self) -> str:
        text = f"train {len(self.train):,}, validation {len(self.val):,}"
        if self.cuts:
            own = [end - first for first, end in pairwise(self.cuts)]
            text += f", each replica has its own {min(own):,} to {max(own):,} for training"
        return text

    def by_replica(self, replicas: int, block_size: int) -> "Corpus":
        """This corpus with cuts: each replica has its own documents, whole ones that follow one
        another, with about 1/M of the tokens. Raises UserError if that cannot be."""
        if self.eot_token is None:
            raise UserError("--data_by_replica: the corpus's meta.json has no eot_token")
        cuts = [0]
        for i in range(1, replicas):
            cuts.append(self.next_document(i * len(self.train) // replicas))
        cuts.append(len(self.train))
        if min(end - first for first, end in pairwise(cuts)) <= block_size:
            raise UserError(
                f"--data_by_replica: the training part has too few documents for {replicas} "
                f"replicas, each needs {block_size + 1:,} tokens of its own: use more text or "
                "fewer replicas"
            )
        return dataclasses.replace(self, cuts=cuts)

    def next_document(self, position: int) -> int:
        """Where the first document begins that begins at this position of the training part or
        later."""
        for first in range(max(0, position - 1), len(self.train), 2**20):
            found = np.flatnonzero(self.train[first : first + 2**20] == self.eot_token)
            if len(found):
                return first + int(found[0]) + 1
        return len(self.train)

    def training_part(self, rank: int, world_size: int) -> tuple:
        """(first, end) of what this rank draws from: all of the training part, or its replica's."""
        if not self.cuts:
            return 0, len(self.train)
        i = rank * (len(self.cuts) - 1) // world_size
        return self.cuts[i], self.cuts[i + 1]

    def check(self, tokens: np.ndarray):
        """Raise UserError if one of these tokens is not in the vocabulary."""
        largest = tokens.max(initial=0)
        if largest >= self.vocab_size:
            raise UserError(
                f"the corpus contains token {largest}, but its vocabulary has {self.vocab_size} "
                "tokens: correct its meta.json, or give a larger --vocab_size"
            )


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
    val = []
    # Sorted, because the order of the file system must not matter. Some links may be broken.
    for path in sorted(filter(os.path.isfile, paths)):
        text = Path(path).read_bytes().decode(errors="replace") + "\n"
        document = np.append(tokenizer.encode(text), np.uint16(tokenizer.eot_token))
        name = os.path.relpath(path, root)
        part = val if is_validation(name.encode()) else train
        part.append(document)

    train, val = np.concatenate(train), np.concatenate(val)
    digest = hashlib.sha256(train)
    digest.update(val)
    return Corpus(
        train, val, tokenizer.n_vocab, digest.hexdigest()[:16], "byte", tokenizer.eot_token,
        bytes_per_token=1.0,
    )  # fmt: skip


def load(folder=None, vocab_size: int = 0, block_size: int = 0) -> Corpus:
    """Open a corpus. folder: as this program makes it; None: the built-in corpus. vocab_size: of
    the model, which may have more tokens than the corpus (0: the corpus's). block_size: if given,
    both parts must have a window of it. Raises OSError if the corpus is missing, UserError if it is
    none, or has other tokens."""
    corpus = open_folder(Path(folder)) if folder else standard_library()
    corpus.vocab_size = vocab_size or corpus.vocab_size
    for part in corpus.train, corpus.val:
        corpus.check(part[:CHECKED_TOKENS])
    if min(len(corpus.train), len(corpus.val)) <= block_size:
        raise UserError(
            f"the corpus has {len(corpus.train):,} tokens for training and {len(corpus.val):,} for "
            f"validation, but each part needs at least {block_size + 1:,}: use more text or lower "
            "--block_size"
        )
    return corpus


def open_folder(folder: Path) -> Corpus:
    title = f"--data {folder}"
    if folder.is_file():
        raise UserError(f"{title} is no folder: python data.py --input FILE --out FOLDER makes one")
    names = os.listdir(folder)
    if "tokens.bin" in names:
        raise UserError(f"{title} is a corpus of an earlier edition: make it again with data.py")
    missing = [name for name in ("train.bin", "val.bin", "meta.json") if name not in names]
    if missing == ["meta.json"]:
        raise UserError(
            f"{title} has no meta.json: if it is nanoGPT's with GPT-2's tokens, "
            f"echo '{NANOGPT}' > {folder}/meta.json"
        )
    if missing:
        raise UserError(
            f"{title} has no {', '.join(missing)}: data.py makes such a folder from text, and its "
            "first lines say how token files of other programs become one"
        )

    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype = {"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]
        vocab_size = int(meta["vocab_size"])
        tokenizer = meta.get("tokenizer", UNKNOWN)
        if tokenizer == "tokenizer.json":
            tokenizer = (folder / "tokenizer.json").read_text("utf-8")
        elif tokenizer not in ("byte", "gpt2", UNKNOWN):
            raise ValueError
        bytes_per_token = float(meta.get("bytes_per_token", np.nan))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{title}: meta.json must be like {NANOGPT}") from None

    train, val = (open_tokens(folder / name, dtype) for name in ("train.bin", "val.bin"))
    digest = hashlib.sha256()
    for tokens in train, val:
        digest.update(f"{len(tokens)} ".encode())
        digest.update(tokens[: 2**19])  # all of it could take minutes
        digest.update(tokens[-(2**19) :])
    return Corpus(
        train, val, vocab_size, digest.hexdigest()[:16], tokenizer, meta.get("eot_token"),
        bytes_per_token,
    )  # fmt: skip


def open_tokens(path: Path, dtype) -> np.memmap:
    """A file of token ids. Raises UserError if it is text, or if a header stands in front."""
    with open(path, "rb") as file:
        head = file.read(2**16)
    if head.startswith(LFS_POINTER):
        raise UserError(f"{path} is a Git LFS pointer: git lfs pull")
    if is_text(head):
        raise UserError(f"{path} is text, not token ids: give it to data.py")
    if int.from_bytes(head[:4], "little") in HEADERS:
        raise UserError(
            f"{path} has a header of llm.c or modded-nanogpt: tail -c +1025 {path} > train.bin "
            "makes a file without it, in a folder of its own"
        )
    try:
        return np.memmap(path, dtype, "r")
    except ValueError as error:  # empty, or half a token at its end
        raise UserError(f"{path}: {error}") from None


def is_text(head: bytes) -> bool:
    """Is this the beginning of a text? None has bytes below 9 (a tab), of token ids some are."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # it may end within a character
    except UnicodeDecodeError:
        return False
    return min(head, default=0) >= 9


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
        """(inputs, targets) of batch_size rows, at random places of the training part, or of the
        replica's own part of it."""
        philox = np.random.Philox(key=self.seed, counter=[0, 0, 0, step])
        first, end = self.corpus.training_part(self.rank, self.world_size)
        size = (self.accum, self.world_size, self.batch_size)
        starts = np.random.Generator(philox).integers(first, end - self.block_size, size=size)
        return self.windows(self.corpus.train, starts[micro_step, self.rank])

    def validation(self, eval_batches: int):
        """Yield this rank's share of eval_batches * VALIDATION_ROWS windows, spread evenly over the
        validation part: (inputs, targets, rows that count). All ranks get the same number of
        batches, because a sharded forward is a collective; a rank without more windows gets one
        for 0 rows."""
        total = eval_batches * VALIDATION_ROWS
        last = len(self.corpus.val) - self.block_size - 1
        starts = np.arange(total) * last // (total - 1)
        share = -(-total // self.world_size)
        own = starts[self.rank * share : (self.rank + 1) * share]
        for first in range(0, share, self.batch_size):
            rows = own[first : first + self.batch_size]
            inputs, targets = self.windows(self.corpus.val, rows if len(rows) else starts[:1])
            yield inputs, targets, len(rows)

    def windows(self, tokens: np.ndarray, starts: np.ndarray) -> tuple:
        """(inputs, targets) of the windows of these tokens that begin at `starts`."""
        rows = tokens[starts[:, None] + np.arange(self.block_size + 1)]
        self.corpus.check(rows)
        rows = torch.from_numpy(rows.astype(np.int64))
        if self.device.type == "cuda":  # pinned, so that the copy does not block the host
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]


def main():
    parser = Parser(description="Turn text into a corpus folder for train.py --data.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help=".txt, .jsonl or .parquet")
    add("--field", default="text", help="text field of .jsonl and .parquet (default: text)")
    add("--tokenizer", default="byte", help="byte (default), gpt2, or a folder with tokenizer.json")
    add("--out", required=True, metavar="FOLDER", help="new folder")
    args = parser.parse_args()
    for name in "input", "tokenizer", "out":
        check_limits(f"--{name}", getattr(args, name), {})
    write_corpus(text_documents(args.input, args.field), args.tokenizer, args.out)
    corpus = load(args.out)
    print(f"{args.out}: {len(corpus):,} tokens ({args.tokenizer}): {corpus.describe()}")


if __name__ == "__main__":
    run_command("data.py", main)
