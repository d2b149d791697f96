"""Text -> token ids and back. A tokenizer has a name, n_vocab, eot_token (end of text),
encode(text) -> an array, and decode(ids) -> text.

    byte                    256 bytes and end-of-text; works offline
    gpt2                    tiktoken's, which downloads the vocabulary once
    a tokenizer.json        Hugging Face's format; needs the package tokenizers

A model or a corpus names its tokenizer by a text: `byte`, `gpt2`, the content of a tokenizer.json,
or UNKNOWN, for token files of other programs. to_json() translates the first two into the third.
"""

import json
from pathlib import Path

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

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.uint16)

    def decode(self, tokens: list) -> str:
        return bytes(tokens).decode(errors="replace")


class GPT2Tokenizer:
    name = "gpt2"

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

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())


class JsonTokenizer:
    """The tokenizer of a tokenizer.json."""

    name = "tokenizer.json"

    def __init__(self, text: str):
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # it has no kind of its own
            raise UserError(f"tokenizer.json is damaged ({error})") from None
        self.tokenizer.encode_special_tokens = True  # <|endoftext|> in a text is text
        ids = self.tokenizer.get_vocab()
        self.n_vocab = 1 + max(ids.values())
        ends = [name for name in ENDS_OF_TEXT if name in ids]
        if not ends:
            raise UserError(f"tokenizer.json has no end-of-text token ({', '.join(ENDS_OF_TEXT)})")
        self.end_of_text = ends[0]
        self.eot_token = ids[self.end_of_text]

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, tokens: list) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def read_tokenizer(name: str) -> tuple:
    """--tokenizer -> (argument of make_tokenizer(), size of the model's vocabulary). name: byte,
    gpt2, or a folder with a tokenizer.json. The model is that of a config.json beside it. It may
    have more tokens than the tokenizer (padding) or fewer (added tokens). Raises OSError if there
    is no such folder."""
    if name in ("byte", "gpt2"):
        return name, make_tokenizer(name).n_vocab
    # Bytes that are not UTF-8 become characters that the tokenizer refuses.
    text = Path(name, "tokenizer.json").read_text(errors="surrogateescape")
    config = Path(name, "config.json")
    if config.exists():
        try:
            return text, int(json.loads(config.read_text())["vocab_size"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{config} has no vocab_size") from None
    return text, make_tokenizer(text).n_vocab


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
