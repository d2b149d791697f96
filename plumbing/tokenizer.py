"""Text -> token ids and back, with one interface, that of tiktoken's Encoding.

    byte                    256 bytes and end-of-text; works offline
    gpt2                    tiktoken's, which downloads the vocabulary once
    a tokenizer.json        Hugging Face's format; needs the package tokenizers

A model or a corpus names its tokenizer by a text: `byte`, `gpt2`, the content of a tokenizer.json,
or UNKNOWN, for token files of other programs. to_json() translates the first two into the third.
"""

import json
import threading
from pathlib import Path

import numpy as np
import tiktoken

from config import UserError, read_number

DOWNLOAD_S = 60
UNKNOWN = "unknown"
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # in a tokenizer.json


def encode(encoding, text: str) -> np.ndarray:
    return encoding.encode_to_numpy(text, disallowed_special=())


def make_tokenizer(name: str):
    """A tiktoken.Encoding, or a FromJson, from the text that names it. Raises UserError."""
    if name.lstrip().startswith("{"):
        return FromJson(name)
    if name not in ("byte", "gpt2"):
        raise UserError("the tokenizer of this model is not known")
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


class FromJson:
    """The tokenizer of a tokenizer.json, with those methods of tiktoken.Encoding that are used."""

    def __init__(self, text: str):
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package has no class of its own for its errors
            raise UserError(f"tokenizer.json is damaged ({str(error)[:100]})") from None
        self.tokenizer.encode_special_tokens = True  # <|endoftext|> in a text is text
        ids = self.tokenizer.get_vocab()
        self.name, self.n_vocab = "tokenizer.json", 1 + max(ids.values())
        self.end = next((name for name in ENDS_OF_TEXT if name in ids), None)
        if self.end is None:
            raise UserError(f"tokenizer.json has no end-of-text token ({', '.join(ENDS_OF_TEXT)})")
        self.eot_token = ids[self.end]

    def encode(self, text: str, disallowed_special=()) -> list:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_to_numpy(self, text: str, disallowed_special=()) -> np.ndarray:
        return np.array(self.encode(text), dtype=np.int64)

    def decode(self, tokens: list, errors="replace") -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


def read_tokenizer(name: str) -> tuple:
    """--tokenizer -> (argument of make_tokenizer(), size of the model's vocabulary). name: byte,
    gpt2, or a folder with a tokenizer.json. The model is that of a config.json beside it. It may
    have more tokens than the tokenizer (padding) or fewer (added tokens)."""
    if name in ("byte", "gpt2"):
        return name, make_tokenizer(name).n_vocab
    try:
        text = Path(name, "tokenizer.json").read_text()
        config = Path(name, "config.json")
        if config.exists():
            return text, read_number(json.loads(config.read_text()), "vocab_size", "vocab_size")
    except (UserError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or f"damaged ({str(error)[:100]})"
        hint = "give byte, gpt2, or a folder with a tokenizer.json"
        raise UserError(f"--tokenizer {name[:200]}: {reason}; {hint}") from None
    return text, make_tokenizer(text).n_vocab


def to_json(name: str) -> tuple:
    """(the tokenizer.json with the same tokens as make_tokenizer(name); its end-of-text token, as
    an id and as text)"""
    encoding = make_tokenizer(name)
    eot = encoding.eot_token
    if isinstance(encoding, FromJson):
        return json.loads(name), eot, encoding.end
    tokens = [encoding.decode_single_token_bytes(i) for i in range(eot)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    # The format has no bytes, but letters: printable bytes are their own, the others follow U+0100.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    spell = lambda token: "".join(letters[byte] for byte in token)
    vocab = {spell(token): rank for token, rank in ranks.items()}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = encoding.name != "byte"  # GPT-2's pattern
    merges = [list(map(spell, merged_from(token, ranks))) for token in tokens if len(token) > 1]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": eot, "content": ENDS_OF_TEXT[0], "special": True} | flags],
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }, eot, ENDS_OF_TEXT[0]  # fmt: skip


def merged_from(token: bytes, ranks: dict) -> list:
    """The two tokens of lower rank that are merged into this one."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
