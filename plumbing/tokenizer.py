"""Text -> token ids and back. A tokenizer has a name, n_vocab, eot_token (end of text), begin (the
ids that stand in front of each document: none, or the one that Llama's tokenizers put there),
encode(text) -> an array, without these, encode_batch(texts) -> arrays, one after the other, made on
all cores, and decode(ids) -> text.

    byte                    256 bytes and end-of-text; works offline
    gpt2                    tiktoken's, which downloads the vocabulary once
    a tokenizer.json        Hugging Face's format; needs the package tokenizers

A model or a corpus names its tokenizer by a text: `byte`, `gpt2`, the content of a tokenizer.json,
or UNKNOWN, for token files of other programs. to_json() translates the first two into the third.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import tiktoken

from config import UserError

UNKNOWN = "unknown"
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # in a tokenizer.json


def make_tokenizer(name: str):
    """The tokenizer that this text names. Raises UserError."""
    if name == UNKNOWN:
        raise UserError("the tokenizer of this model is not known")
    if name == "byte":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    return JsonTokenizer(name)


class ByteTokenizer:
    name = "byte"
    eot_token = 256
    n_vocab = 257
    begin = []

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: list) -> list:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: list) -> str:
        return bytes(tokens).decode(errors="replace")


def count_cores() -> int:
    """Those that this process may use. macOS and Windows know only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# GPT-2 cuts a text into words and runs of white space, and tokenizes each piece alone. Its pattern
# looks ahead: a run that a word follows ends before its last character, so that a space stays with
# its word. tiktoken needs three times as long for a pattern that looks ahead. This one does not. It
# is for a text in which mark_runs() has put a MARK where a run is to be cut; the mark is a piece.
MARK = "\0"
PIECES = r"\x00|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}\x00]+|\s+"
SPACES = np.zeros(256, bool)
SPACES[list(b"\t\n\v\f\r ")] = True
OTHER_SPACES = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


def mark_runs(text: str) -> str | None:
    """The text with a mark before the last character of each run of white space that a word
    follows. None if it already has such characters, or white space of more than a byte."""
    if MARK in text or (not text.isascii() and OTHER_SPACES.search(text)):
        return None
    letters = np.frombuffer(text.encode(), np.uint8)
    space = SPACES[letters]
    cuts = np.flatnonzero(space[:-2] & space[1:-1] & ~space[2:]) + 1
    return np.insert(letters, cuts, ord(MARK)).tobytes().decode()


class GPT2Tokenizer:
    name = "gpt2"
    begin = []

    def __init__(self):
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:  # of many kinds
            raise UserError(
                f"cannot download the gpt2 vocabulary ({type(error).__name__}): connect once, "
                "point TIKTOKEN_CACHE_DIR at a folder that has it, or use --tokenizer byte"
            ) from None
        self.eot_token = self.encoding.eot_token
        self.n_vocab = self.encoding.n_vocab
        self.decode = self.encoding.decode
        ranks = self.encoding._mergeable_ranks
        special = self.encoding._special_tokens
        self.pool = ThreadPoolExecutor(count_cores())
        self.mark = ranks[MARK.encode()]
        self.fast = tiktoken.Encoding(
            "gpt2", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_fast(self, text: str) -> np.ndarray:
        """What encode() returns."""
        marked = mark_runs(text)
        if marked is None:
            return self.encode(text)
        tokens = self.fast.encode_to_numpy(marked, disallowed_special=())
        return tokens[tokens != self.mark]

    def encode_batch(self, texts: list):
        return self.pool.map(self.encode_fast, texts)  # it has begun, and does not wait


@contextmanager
def no_panic():
    """Raise UserError where the Rust code of the package tokenizers panics, for example because a
    regular expression takes too many steps. Its error is no Exception, and has no public name."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer.json cannot encode this text ({reason})") from None


class JsonTokenizer:
    """The tokenizer of a tokenizer.json: its vocabulary, merges, normalizer and decoder, and the
    token that it puts in front of a text. Other settings that the file may have are not for
    training: to cut or pad texts, to draw merges at random, to put a token behind a text."""

    name = "tokenizer.json"

    def __init__(self, text: str):
        import tokenizers

        try:
            with no_panic():
                self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # it has no kind of its own
            raise UserError(f"tokenizer.json is damaged ({error})") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None
        self.tokenizer.encode_special_tokens = True  # <|endoftext|> in a text is text
        ids = self.tokenizer.get_vocab()
        self.n_vocab = 1 + max(ids.values())
        ends = [name for name in ENDS_OF_TEXT if name in ids]
        if not ends:
            raise UserError(f"tokenizer.json has no end-of-text token ({', '.join(ENDS_OF_TEXT)})")
        self.end_of_text = ends[0]
        self.eot_token = ids[self.end_of_text]
        self.begin = self.read_begin(ids)

    def read_begin(self, ids: dict) -> list:
        """The ids that its post-processor puts in front of a text. If it also puts some behind the
        text, it is replaced: a prompt must not end the document."""
        from tokenizers.processors import TemplateProcessing

        for text in ("a", *ids):  # the first that has tokens
            with no_panic():
                whole = self.tokenizer.encode(text)
            if 0 in whole.sequence_ids:
                break
        places = whole.sequence_ids  # 0: of the text, None: of the post-processor
        first = places.index(0) if 0 in places else 0
        begin = whole.ids[:first]
        if places[-1:] == [None]:
            names = [(self.tokenizer.id_to_token(id), id) for id in begin]
            single = [*(name for name, _ in names), "$A"]
            self.tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=names)
        return begin

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list) -> list:
        with no_panic():
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int64) for each in found]

    def decode(self, tokens: list) -> str:
        with no_panic():
            return self.tokenizer.decode(tokens, skip_special_tokens=False)


def to_json(name: str) -> str:
    """The tokenizer.json with the same tokens as make_tokenizer(name). Needs transformers."""
    if name not in ("byte", "gpt2"):
        return name
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(extra_special_tokens=[ENDS_OF_TEXT[0]])  # with the next id
    ids = {bytes([byte]): byte for byte in range(256)}  # of words
    if name == "gpt2":
        encoding = make_tokenizer(name).encoding
        ids = encoding._mergeable_ranks
        converter.pattern = encoding._pat_str
    converter.load_tiktoken_bpe = lambda path: ids  # in place of reading a file
    return converter.converted().to_str()
