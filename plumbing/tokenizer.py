"""Text -> token ids and back. A tokenizer has

    name, n_vocab       byte, gpt2 or tokenizer.json; how many ids there are
    eot_token           the id that ends a document
    begin               the ids in front of each document: none, or Llama's <s>
    encode(text)        -> an array of ids, without these
    encode_batch(texts) -> a list of arrays or lists of ids, made on all cores
    decode(ids)         -> text

    byte                256 bytes and end-of-text; works offline
    gpt2                tiktoken's, which downloads the vocabulary once
    a tokenizer.json    Hugging Face's format; needs the package tokenizers

A model or a corpus names its tokenizer by a text: `byte`, `gpt2`, the content of a tokenizer.json,
or UNKNOWN. to_json() translates the first two into the third.
"""

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
        self.encode_batch = self.encoding.encode_ordinary_batch  # <|endoftext|> in a text is text

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.encoding.encode_ordinary(text), np.int64)


class JsonTokenizer:
    """The tokenizer of a tokenizer.json, without its settings to cut or pad texts."""

    name = "tokenizer.json"

    def __init__(self, text: str):
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # it has no kind of its own
            raise UserError(f"tokenizer.json is damaged ({error})") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # <|endoftext|> in a text is text

        ids = self.tokenizer.get_vocab()
        self.n_vocab = 1 + max(ids.values())
        ends = [name for name in ENDS_OF_TEXT if name in ids]
        if not ends:
            raise UserError(f"tokenizer.json has no end-of-text token ({', '.join(ENDS_OF_TEXT)})")
        self.end_of_text = ends[0]
        self.eot_token = ids[self.end_of_text]

        whole = self.tokenizer.encode("a")  # with what its post-processor adds, which is no text
        places = whole.sequence_ids  # 0: of the text, None: of the post-processor
        first = places.index(0) if 0 in places else 0
        self.begin = whole.ids[:first]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list) -> list:
        found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, np.int64) for each in found]

    def decode(self, tokens: list) -> str:
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
