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
                    tokenizer, vocab_size, dtype, tokens (their number), train_tokens, validation
                    (how its documents were chosen), bytes_per_token (of text) and hash (of the
                    tokens).
    token files     of nanoGPT (no header), llm.c, modded-nanogpt and NeMo (a header), Megatron
                    (.bin beside .idx), build-nanogpt (.npy), or folders of them. Known headers are
                    256 int32 whose third is the number of ids, which are 2 or 4 bytes wide. What
                    looks like another header, or like another format, is refused. Without a header
                    the ids are 2, 4 or 8 bytes wide: zeros between them tell.
                    Files with one of the words val, valid, validation, dev, test in their name, or
                    in a folder of that name, if there are several, are the validation part, also a
                    val.bin beside a train.bin; without any it is the last 5%. A file with train or
                    training in its name is never in it.

Files are memory-mapped, never copied.

The windows of a rank are a pure function of (seed, step, micro-step, rank): a counter-based
generator (Philox) draws the starts of *all* windows of a global step, and each rank takes its rows.

    rows of a global step   [ micro-step 0: rank 0 | rank 1 | ... ][ micro-step 1: rank 0 | ... ]
                              batch_size rows each

So a checkpoint needs no state of the data, and the global batch does not depend on the mesh. (With
--data_by_replica it does: each replica draws from documents of its own.)

    python data.py --input book.txt more.jsonl --tokenizer byte --out my_corpus
    torchrun ... train.py --data my_corpus
    torchrun ... train.py --data train.bin --vocab_size 65       # or --data shards/*.bin

What --input reads, all of it piece by piece:

    JSON lines          one document per line, in its field `text`, or that of --field
    .parquet            one document per row, in its column `text`, or that of --field
    text                one document
    .gz, .zst           packed JSON lines or text

The content decides, not the name: part-00000 or a .json.gz can be JSON lines, and a .jl can be
JSON lines or Julia's source text. But a .jsonl, .jsonlines or .ndjson with anything but JSON lines
is refused: it is damaged. Text is UTF-8. A document whose text is null or empty is left out.

Each document ends with the tokenizer's end-of-text token. It begins with the token that the
tokenizer puts in front of a text (Llama's do), if there is one. --tokenizer is byte, gpt2, or a
folder with a tokenizer.json. .parquet and .zst need the package pyarrow. (The paper's corpus,
HuggingFaceFW/fineweb-edu, is a folder of .parquet files.)

A hash of each document puts about one in twenty into the validation part, so a new file moves none
of the others. Of fewer than 40 documents, or if the hash chooses none of them, the validation part
is the last 5%, and a new file moves it.
"""

import dataclasses
import hashlib
import json
import math
import mmap
import os
import re
import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from config import Parser, UserError, check_limits, run_command
from plumbing.text import LAST, VALIDATION_FRACTION, find_kind, is_text, is_validation
from plumbing.text import regular_file, smallest_dtype, text_documents, write_corpus
from plumbing.tokenizer import UNKNOWN, ByteTokenizer, make_tokenizer

VALIDATION_ROWS = 16  # windows per validation batch, for every training batch size
GPT2 = 50257  # tokens in its vocabulary
END_OF_TEXT = {"byte": ByteTokenizer.eot_token, "gpt2": GPT2 - 1}  # GPT-2's without a download
HINT = "name token files (.bin, .npy), or one corpus folder: data.py --input FILE --out DIR"
HEADERS = {20240520: np.uint16, 20240801: np.uint32}  # first number of llm.c's token files -> ids
MEGATRON_DTYPES = {4: np.int32, 5: np.int64, 8: np.uint16}  # the codes of its .idx files
TOKEN_FILES = {".bin", ".npy"}
VALIDATION_NAMES = ("val", "valid", "validation", "dev", "test")
CHECKED_TOKENS = 1_000_000  # at the beginning of each file, when a corpus is opened; then batches


# ---- corpora ----


class TokenFiles:
    """Arrays of token ids, one after the other, as one flat array. names: of their files."""

    def __init__(self, arrays: list, names: list):
        self.arrays = arrays
        self.names = names
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

    def place(self, position: int) -> str:
        """The file that has this token, and where."""
        i = np.searchsorted(self.begins, position, side="right") - 1
        return f"{self.names[i]}, position {position - self.begins[i]:,}"


@dataclass
class Corpus:
    tokens: TokenFiles
    train_tokens: int  # the first so many are for training, the rest for validation
    tokenizer: str  # the argument of make_tokenizer()
    vocab_size: int
    bytes_per_token: float  # of text: turns nats per token into bits per byte; NaN: not known
    hash: str  # of the tokens: equal on all ranks if they have the same corpus
    training: str = ""  # which files are for training
    validation: str = LAST  # which files, or how it was chosen
    cuts: list | None = None  # replica i reads the training part from cuts[i] to cuts[i + 1]

    def describe(self) -> str:
        rest = len(self.tokens) - self.train_tokens
        training = f" ({self.training})" * bool(self.training)
        text = f"train {self.train_tokens:,}{training}, validation {rest:,} ({self.validation})"
        if self.cuts:
            own = [end - first for first, end in pairwise(self.cuts)]
            text += f", each replica has its own {min(own):,} to {max(own):,} for training"
        return text

    def by_replica(self, replicas: int, block_size: int) -> "Corpus":
        """This corpus with cuts: each replica has its own documents, whole ones that follow one
        another, with about 1/M of the tokens. Raises UserError if that cannot be."""
        flag = "--data_by_replica"
        if self.tokenizer not in END_OF_TEXT:
            if self.tokenizer == UNKNOWN:
                hint = "these token files do not tell where a document ends; make them with data.py"
                raise UserError(f"{flag}: {hint}")
            END_OF_TEXT[self.tokenizer] = make_tokenizer(self.tokenizer).eot_token
        end = END_OF_TEXT[self.tokenizer]
        cuts = [0]
        for i in range(1, replicas):
            cuts.append(self.next_document(i * self.train_tokens // replicas, end))
        cuts.append(self.train_tokens)
        if min(end - first for first, end in pairwise(cuts)) <= block_size:
            raise UserError(
                f"{flag}: the training part has too few documents for {replicas} replicas, each "
                f"needs {block_size + 1:,} tokens of its own: use more text or fewer replicas"
            )
        return dataclasses.replace(self, cuts=cuts)

    def next_document(self, position: int, end_of_text: int) -> int:
        """Where the first document begins that begins at this position of the training part or
        later."""
        for first in range(max(0, position - 1), self.train_tokens, 2**20):
            piece = self.tokens[np.arange(first, min(first + 2**20, self.train_tokens))]
            found = np.flatnonzero(piece == end_of_text)
            if len(found):
                return first + int(found[0]) + 1
        return self.train_tokens

    def training_part(self, rank: int, world_size: int) -> tuple:
        """(first, end) of what this rank draws from: all of the training part, or its replica's."""
        if not self.cuts:
            return 0, self.train_tokens
        i = rank * (len(self.cuts) - 1) // world_size
        return self.cuts[i], self.cuts[i + 1]

    def check(self, tokens: np.ndarray, place):
        """Raise UserError if a token is not in the vocabulary. place: its index -> where it is."""
        if tokens.max(initial=0) < self.vocab_size and tokens.min(initial=0) >= 0:
            return
        wrong = (tokens >= self.vocab_size) | (tokens < 0)
        i = int(wrong.ravel().argmax())
        token = int(tokens.ravel()[i])
        way_out = "make it again with data.py"
        if 0 <= token < 2**31:  # the others were negative when they were written
            way_out += ", or give a larger --vocab_size"
        raise UserError(
            f"the corpus contains token {token} ({place(i)}), but its vocabulary has "
            f"{self.vocab_size} tokens: {way_out}"
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
    validation = []
    # Sorted, because the order of the file system must not matter. Some links may be broken.
    for path in sorted(filter(os.path.isfile, paths)):
        text = Path(path).read_bytes().decode(errors="replace") + "\n"
        document = np.append(tokenizer.encode(text), np.uint16(tokenizer.eot_token))
        name = os.path.relpath(path, root)
        part = validation if is_validation(name.encode()) else train
        part.append(document)

    tokens = np.concatenate(train + validation)
    digest = hashlib.sha256(tokens).hexdigest()[:16]
    train_tokens = sum(map(len, train))
    return Corpus(
        TokenFiles([tokens], ["standard library"]), train_tokens, "byte", tokenizer.n_vocab, 1.0,
        digest, validation=f"{len(validation)} of {len(paths)} files, by hash",
    )  # fmt: skip


def load(data, vocab_size: int = 0, block_size: int = 0) -> Corpus:
    """Open a corpus. data: a list of one folder that data.py has made, or of token files and
    folders of them; a string is one of these; None: the built-in corpus. vocab_size: of the model,
    which may have more tokens than the corpus (0: the corpus's; of token files GPT-2's).
    block_size: if given, both parts must have a window of it. Raises OSError if the corpus is
    missing, UserError if it is damaged or has other tokens."""
    names = data or []
    if isinstance(data, (str, Path)):
        names = [str(data)]
    title = f"--data {' '.join(names)}"
    try:
        if data is None:
            corpus = standard_library()
        elif len(names) == 1 and Path(names[0], "meta.json").exists():
            corpus = load_folder(names[0])
        else:
            corpus = load_token_files(names, vocab_size or GPT2)
        corpus.vocab_size = vocab_size or corpus.vocab_size
        for array, name in zip(corpus.tokens.arrays, corpus.tokens.names):
            corpus.check(array[:CHECKED_TOKENS], lambda i: f"{name}, position {i:,}")
        if block_size:
            check_windows(corpus, block_size)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{title}: damaged ({error}); {HINT}") from None
    return corpus


def load_folder(folder: str) -> Corpus:
    meta = json.loads(regular_file(Path(folder, "meta.json")).read_text())
    dtype = meta.pop("dtype")
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"meta.json: dtype {dtype!r}")
    array = memory_map(regular_file(Path(folder, "tokens.bin")), dtype)
    if len(array) != meta.pop("tokens"):
        raise ValueError(f"tokens.bin has {len(array):,} tokens")
    limits = {"train_tokens": len(array), "vocab_size": 2**31 - 1}
    for name, most in limits.items():
        if type(meta[name]) is not int or not 0 <= meta[name] <= most:
            raise ValueError(f"meta.json: {name} {meta[name]!r}")
    ratio = meta["bytes_per_token"]
    if type(ratio) not in (int, float) or not 0 < ratio < math.inf:
        raise ValueError(f"meta.json: bytes_per_token {ratio!r}")
    for name in "tokenizer", "hash":
        if type(meta[name]) is not str:
            raise ValueError(f"meta.json: {name} {meta[name]!r}")
    if meta["tokenizer"] == "tokenizer.json":
        file = regular_file(Path(folder, "tokenizer.json"))
        meta["tokenizer"] = file.read_text(encoding="utf-8")
    return Corpus(TokenFiles([array], [str(Path(folder, "tokens.bin"))]), **meta)


def load_token_files(names: list, vocab_size: int) -> Corpus:
    training = []  # (path, array)
    validation = []
    digest = hashlib.sha256()
    for path, held_out in find_token_files(names):
        array = open_token_file(path, vocab_size)
        part = validation if held_out else training
        part.append((path, array))
        for piece in array[: 2**19], array[-(2**19) :]:  # all of it could take minutes
            digest.update(f"{len(array)} ".encode() + piece.tobytes())
    if not training:
        raise UserError(
            f"--data {' '.join(names)}: all files are for validation, by their names "
            f"({', '.join(VALIDATION_NAMES)}): name files for training, too, or rename these"
        )

    files = training + validation
    tokens = TokenFiles([array for _, array in files], [str(path) for path, _ in files])
    train_tokens = sum(len(array) for _, array in training)
    chosen = LAST
    if validation:
        chosen = name_files(validation)
    else:
        train_tokens = int(len(tokens) * (1 - VALIDATION_FRACTION))
    name = "gpt2" if vocab_size in (GPT2, 50304) else UNKNOWN  # 50304: padded
    return Corpus(
        tokens, train_tokens, name, vocab_size, np.nan, digest.hexdigest()[:16],
        name_files(training), chosen,
    )  # fmt: skip


def name_files(files: list) -> str:
    names = [path.name for path, _ in files]
    if len(names) > 2:
        names = [f"{names[0]} ... {names[-1]}", f"{len(names)} files"]
    kinds = sorted({array.dtype.name for _, array in files})
    return ", ".join(names + kinds)


def find_token_files(names: list) -> list:
    """[(path, is it for validation?)] of the files in --data, and of the validation files beside
    them."""
    found = []  # (path, name of its folder)
    parents = {Path(name).resolve().parent for name in names if Path(name).is_file()}
    for path in map(Path, names):
        if not path.name:
            raise UserError(f'--data "{path}" names nothing; {HINT}')
        path.stat()  # an error that says what is wrong with it
        if not path.is_dir():
            # Files of one folder, such as test/*.bin, are told apart by their own names.
            found.append((path, path.resolve().parent.name if len(parents) > 1 else ""))
            continue
        inside = sorted(each for each in path.iterdir() if each.suffix in TOKEN_FILES)
        if len({each.suffix for each in inside}) > 1:
            raise UserError(f"--data {path} has .bin and .npy files: name those that you mean")
        found += [(each, path.resolve().name) for each in inside]

    beside = []
    for path, folder in found:
        for word in VALIDATION_NAMES:
            other = path.with_name(path.name.replace("train", word))
            if other.exists() and other != path:
                beside.append((other, folder))
                break

    files = {}  # a file counts once
    for path, folder in found + beside:
        if path.suffix not in TOKEN_FILES or path.with_name("meta.json").exists():
            files = {}
            break
        words = find_words(path.name)
        if not words and len(names) > 1:
            words = {folder.lower()}
        held_out = bool(words & set(VALIDATION_NAMES)) and not words & {"train", "training"}
        files.setdefault(path.resolve(), (path, held_out))
    if not files:
        raise UserError(f"--data {' '.join(names)}: no token files; {HINT}")
    return list(files.values())


def find_words(name: str) -> set:
    """Those of a name that say what a file is for: `val` in fineweb_val_0.bin, not in interval."""
    return set(re.findall("[a-z]+", name.lower())) & {"train", "training", *VALIDATION_NAMES}


def open_token_file(path: Path, vocab_size: int) -> np.memmap:
    regular_file(path)
    if path.suffix == ".npy":
        array = np.lib.format.open_memmap(path, "r")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{path.name} is no row of token ids: {array.dtype} {array.shape}")
        return without_reading_ahead(array)
    if path.with_suffix(".idx").exists():
        return open_megatron_file(path)

    with open(path, "rb") as file:
        head = file.read(2**16)
    kind = "text" if is_text(head) else find_kind(head)
    if kind:
        raise ValueError(f"{path.name} has {kind}, not token ids")

    # llm.c's begin with 256 int32: magic, version, number of tokens. So do those of others, with
    # another magic. nanoGPT's have no header.
    header = np.frombuffer(head[: min(1024, len(head) // 4 * 4)], np.int32)
    dtype = HEADERS.get(int(header[0]))
    count = int(header[2]) if len(header) == 256 else 0
    rest = path.stat().st_size - 1024
    if dtype is None and count > 0 and rest in (2 * count, 4 * count):
        dtype = np.uint16 if rest == 2 * count else np.uint32
    if dtype is None:
        if has_header(header, path.stat().st_size):
            raise ValueError(f"{path.name} has a header of an unknown kind")
        return memory_map(path, find_dtype(path, vocab_size))
    array = memory_map(path, dtype, 1024)
    if len(array) != count:
        raise ValueError(f"{path.name} has {len(array):,} tokens, its header says {count:,}")
    return array


def has_header(words: np.ndarray, size: int) -> bool:
    """Do the first int32 of a file of this size look like a header, not like ids? Then one of them
    is the number of ids behind it, 2 or 4 bytes each, or letters stand in front of a small number,
    or nearly all of 256 are zero."""
    lengths = [*range(4, 68, 4), *(2**k for k in range(7, 13))]  # of headers, in bytes
    for count in words[:6].view(np.uint32).tolist():
        if any(count > 0 and size - count * width in lengths for width in (2, 4)):
            return True
    if re.match(rb"([!-~]{4}){1,4}.\0{3}", words[:5].tobytes(), re.DOTALL):
        return True
    # Of 8-byte ids half are zero.
    return size > 1024 and bool(words[:8].any()) and np.count_nonzero(words[8:]) < 16


def open_megatron_file(path: Path) -> np.memmap:
    """Its .idx has a magic, a version, the type of the ids, two counts, and the lengths of the
    documents."""
    index = path.with_suffix(".idx")
    regular_file(index)
    with open(index, "rb") as file:
        magic = file.read(9)
        fields = np.frombuffer(file.read(25), "<u8, u1, <u8, <u8")
        if magic != b"MMIDIDX\0\0" or len(fields) != 1:
            raise ValueError(f"{index.name} is no index of Megatron's {path.name}")
        _, code, count, _ = fields[0].tolist()
        if 4 * count > index.stat().st_size:
            raise ValueError(f"{index.name} is damaged: it says that it has {count:,} documents")
        lengths = np.fromfile(file, np.int32, count)
    if code not in MEGATRON_DTYPES:
        raise ValueError(f"{index.name} says that {path.name} has no token ids (type {code})")
    array = memory_map(path, MEGATRON_DTYPES[code])
    if len(array) != lengths.sum(dtype=np.int64):
        raise ValueError(f"{path.name} has {len(array):,} tokens, {index.name} {lengths.sum():,}")
    return array


def find_dtype(path: Path, vocab_size: int) -> np.dtype:
    """The dtype of the ids in a file without a header. The upper bytes of small ids in wide
    integers are zeros. Raises ValueError if its words look like other numbers than ids."""
    size = path.stat().st_size
    words = np.fromfile(path, np.uint16, 2 * CHECKED_TOKENS)
    words = words[: len(words) // 4 * 4].reshape(-1, 4)
    if len(words) < 8 or not words.any():
        return smallest_dtype(vocab_size)
    if size % 8 == 0 and not words[:, 2:].any():
        return np.dtype(np.int64)
    upper = words[:, 1::2]  # of 4-byte integers
    negative = upper == 2**16 - 1
    if negative.any() and (negative | (upper < 16)).all():
        raise ValueError(f"{path.name} has negative ids: write it again without them")
    if not words[:, 2].any():  # bytes 4 and 5 of 8 are zeros, 6 and 7 are not
        raise ValueError(f"{path.name} has 8-byte numbers that are no ids")
    for kind in np.float32, np.float64:
        # As floats, ids of 4 and 8 bytes are tiny; of 2 bytes, some are tiny and some are huge.
        numbers = np.abs(words.view(kind))
        ordinary = (numbers == 0) | (numbers > 1e-9) & (numbers < 1e9)
        if ordinary.mean() > 0.99:
            raise ValueError(f"{path.name} has fractions ({kind.__name__}), not token ids")
    low = words[:, ::2].max()
    high = words[:, 1::2].max()
    if size % 4 == 0 and (high == 0 or high < 16 and low >= 2**12):  # ids below 16 x 65536
        return np.dtype(np.uint32)
    return smallest_dtype(vocab_size)


def memory_map(path, dtype, offset: int = 0) -> np.memmap:
    return without_reading_ahead(np.memmap(path, dtype, "r", offset))


def without_reading_ahead(array: np.memmap) -> np.memmap:
    """Batches read at random positions. Reading ahead costs milliseconds per batch."""
    if hasattr(mmap, "MADV_RANDOM"):  # Windows has no such advice
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
        """(inputs, targets) of batch_size rows, at random places of the training part, or of the
        replica's own part of it."""
        philox = np.random.Philox(key=self.seed, counter=[0, 0, 0, step])
        first, end = self.corpus.training_part(self.rank, self.world_size)
        size = (self.accum, self.world_size, self.batch_size)
        starts = np.random.Generator(philox).integers(first, end - self.block_size, size=size)
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
        positions = starts[:, None] + np.arange(self.block_size + 1)
        tokens = self.corpus.tokens
        rows = tokens[positions]
        self.corpus.check(rows, lambda i: tokens.place(positions.ravel()[i]))
        rows = torch.from_numpy(rows)
        if self.device.type == "cuda":  # pinned, so that the copy does not block the host
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]


def main():
    parser = Parser(description="Turn text into a corpus folder for train.py --data.")
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="text, JSON lines, .parquet; packed: .gz, .zst")
    add("--field", default="text", help="text field of JSON lines and .parquet (default: text)")
    add("--tokenizer", default="byte", help="byte (default), gpt2, or a folder with tokenizer.json")
    add("--out", required=True, help="new folder")
    add("--max_tokens", type=float, default=1e18, help="stop at so many tokens (default: none)")
    args = parser.parse_args()
    for name in "input", "tokenizer", "out":
        check_limits(f"--{name}", getattr(args, name), {})
    check_limits("--max_tokens", args.max_tokens, {"low": 1})
    documents = text_documents(args.input, args.field)
    meta = write_corpus(documents, args.tokenizer, args.out, args.max_tokens)
    rest = meta["tokens"] - meta["train_tokens"]
    print(
        f"{args.out}: {meta['tokens']:,} tokens ({args.tokenizer}), "
        f"{rest:,} of them for validation ({meta['validation']})"
    )


if __name__ == "__main__":
    run_command("data.py", main)
