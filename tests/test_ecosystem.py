"""Models out and in with transformers, records in pandas, text from files that pyarrow has written.
`.ci/run` installs them, see requirements-ecosystem.txt."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import tiktoken
import torch

import data
import hf
import train
from config import UserError
from model import Llama
from plumbing import launch, tokenizer
from ranks import ROOT, Launch, run_training
from sample import continue_text, load
from test_data import check_refused, ids, write_folder

pytestmark = pytest.mark.ecosystem
SHAPE = dict(n_layer=2, n_head=4, n_embd=32, block_size=64, dtype="fp32")
THEIRS = dict(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=80,
    vocab_size=300, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = pytest.importorskip("transformers")
    found.utils.logging.enable_progress_bar()  # as when a program starts
    found.utils.logging.set_verbosity_error()
    return found


@pytest.fixture
def model_pt(tmp_path, corpus_folder):
    """The model of a short run, far from its initial values."""
    options = SHAPE | dict(method="minibatch", max_steps=30, lr=0.05, batch_size=4)
    run_training(1, corpus_folder, out_dir=tmp_path / "run", **options)
    return tmp_path / "run" / "model.pt"


def exported(model_pt, out):
    hf.write_folder(hf.open_model(str(model_pt)), str(out))
    return out


def their_llama(transformers, folder, **more):
    """A random model of theirs, saved."""
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**THEIRS | more))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def test_exported_model_is_the_same_for_transformers(transformers, model_pt, tmp_path, capsys):
    ours, encoding = load(model_pt)
    capsys.readouterr()
    folder = exported(model_pt, tmp_path / "out")
    assert capsys.readouterr().err == ""  # no progress bar
    auto = transformers.AutoModelForCausalLM
    theirs, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or other key
    theirs.eval()
    tokens = torch.randint(257, (3, 64))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=2e-5)
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = theirs_tokenizer("import os\n", return_tensors="pt")
    assert prompt.input_ids.tolist() == [list(b"import os\n")]
    written = theirs.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    text = continue_text(ours, encoding, "import os\n", count=40, temperature=0.0)
    assert theirs_tokenizer.eos_token == "<|endoftext|>" and theirs_tokenizer.eos_token_id == 256
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, 256)
    assert theirs_tokenizer.decode(written[0]).removesuffix("<|endoftext|>") == text


@pytest.mark.parametrize("more", [
    dict(), dict(num_key_value_heads=2, tie_word_embeddings=True),
    dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rms_norm_eps=1e-3),
])  # fmt: skip
def test_run_starts_from_their_model(transformers, corpus_folder, tmp_path, more):
    theirs = their_llama(transformers, tmp_path / "hf", **more)
    (tmp_path / "run").mkdir()
    tokens = np.arange(300, dtype=np.uint16).repeat(9)
    corpus = write_folder(tmp_path / "corpus", tokens, tokens, vocab_size=300)
    argv = dict(init_from=tmp_path / "hf", data=corpus, lr=0.0)
    argv |= dict(method="edit", batch_size=2, shards=2, max_steps=3, sync_warmup_steps=1)
    argv |= dict(tau=2, device="cpu", dtype="fp32", eval_batches=1, out_dir=tmp_path / "run")
    launched = Launch(2, tmp_path / "log", *(f"--{k}={v}" for k, v in argv.items()))
    assert (launched.wait(), launched.lines("err")) == ([0, 0], [])
    (line,) = [line for line in launched.lines("out") if line.startswith("init")]
    heads, tied = more.get("num_key_value_heads", 4), more.get("tie_word_embeddings", False)
    assert f"({heads} heads of keys and values; output matrix tied: {tied})" in line
    tokens = torch.randint(300, (2, 64))
    for path in tmp_path / "hf", tmp_path / "run" / "model.pt":
        source = hf.open_model(str(path))
        ours = Llama(source.config)
        ours.load_state_dict(source.tensors)
        with torch.no_grad():
            torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)


def test_round_trip_is_exact(transformers, model_pt, tmp_path):
    first = hf.open_model(str(model_pt))
    second = hf.open_model(str(exported(model_pt, tmp_path / "out")))
    assert first.config == second.config
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(x, second.tensors[name]) for name, x in first.tensors.items())
    text = "def naïve():\r\n\treturn '\u03c0 \U0001f642'\n" * 7000
    byte, fast = tokenizer.make_tokenizer("byte"), tokenizer.make_tokenizer(second.tokenizer)
    tokens = byte.encode(text).tolist()
    assert len(tokens) > 200_000 and fast.encode(text).tolist() == tokens
    assert fast.decode(tokens) == byte.decode(tokens) == text
    assert (fast.eot_token, fast.n_vocab) == (256, 257)
    again = exported(tmp_path / "out", tmp_path / "again")  # keeps their tokenizer.json
    for name in "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json":
        assert (tmp_path / "out" / name).read_bytes() == (again / name).read_bytes(), name


def small_gpt2(text):
    """GPT-2's encoding with a few words of the text in place of its vocabulary."""
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    ranks = {bytes([byte]): byte for byte in range(256)}
    pairs = Counter(text[i : i + 2].encode() for i in range(len(text) - 1))
    triples = Counter(text[i : i + 3].encode() for i in range(len(text) - 2))
    for pair, _ in pairs.most_common(200):
        ranks.setdefault(pair, len(ranks))
    for triple, _ in triples.most_common(99):
        if triple[:-1] in ranks:
            ranks.setdefault(triple, len(ranks))
    for word in b"--", b"----":
        ranks.setdefault(word, len(ranks))
    special = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def test_byte_pairs_of_tiktoken_give_the_same_tokens_in_a_tokenizer_json(monkeypatch, transformers):
    text = (ROOT / "RESULTS.md").read_text()
    encoding = small_gpt2(text)
    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", lambda name: encoding)
    plain = tokenizer.make_tokenizer("gpt2")
    fast = tokenizer.make_tokenizer(tokenizer.to_json("gpt2"))
    assert fast.end_of_text == "<|endoftext|>"
    assert (fast.eot_token, fast.n_vocab) == (plain.eot_token, plain.n_vocab)
    for each in text, *("-" * count for count in range(20)):  # of equal pairs the first
        assert fast.encode(each).tolist() == plain.encode(each).tolist()


@pytest.mark.parametrize("size, added", [(290, []), (300, ["<pad>"])])  # the model has 300 tokens
def test_their_tokenizer_makes_a_corpus_and_a_model_that_is_exported_with_it(
    transformers, tmp_path, size, added
):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    text = (ROOT / "README.md").read_text()
    trained.train_from_iterator([text], trainer)
    trained.add_tokens(added)
    assert trained.get_vocab_size() == size + len(added)
    their_llama(transformers, tmp_path / "hf")
    trained.save(str(tmp_path / "hf" / "tokenizer.json"))
    data.write_corpus([(text, True)], str(tmp_path / "hf"), tmp_path / "corpus")
    corpus = data.load(tmp_path / "corpus")
    assert corpus.vocab_size == size + len(added)
    tokens = ids(corpus)
    assert trained.decode(tokens[:-1]) == text and tokens[-1] == 0
    argv = [f"--init_from={tmp_path / 'hf'}", f"--data={tmp_path / 'corpus'}", "--method=minibatch"]
    with pytest.raises(UserError, match="another vocabulary .* give --vocab_size 300"):
        launch.Setup([*argv, "--overwrite"], train.METHODS, train.data.load, 1)
    argv += f"--vocab_size=300 --max_steps=2 --device=cpu --out_dir={tmp_path / 'run'}".split()
    argv += ["--eval_batches=1"]
    launched = Launch(1, tmp_path / "log", *argv)
    assert (launched.wait(), launched.lines("err")) == ([0], [])
    folder = exported(tmp_path / "run" / "model.pt", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs(text).input_ids == tokens[:-1]
    model, encoding = load(str(folder))
    assert continue_text(model, encoding, "README", count=5).startswith("README")
    for more in "--n_layer=3", "--n_hidden=64":
        with pytest.raises(UserError, match="another shape, .*n_layer=2.*: leave out the flags"):
            launch.Setup([*argv, more, "--overwrite"], train.METHODS, train.data.load, 1)


def write_tokenizer(folder, begin="", **settings):
    """A small tokenizer.json like Llama's, with `begin` in front of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    trained.train_from_iterator([(ROOT / "README.md").read_text()], trainer)
    if begin:
        trained.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[("<s>", 0)]
        )
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(trained.to_str()) | settings))
    return trained


CUT = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
PAD = {
    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "<s>",
}  # fmt: skip


@pytest.mark.parametrize("begin", ["", "<s>"])
def test_settings_of_a_tokenizer_do_not_cut_or_pad_a_text(tmp_path, begin):
    text = (ROOT / "LICENSE").read_text()  # its hash puts it before the word
    trained = write_tokenizer(tmp_path / "hf", begin, truncation=CUT, padding=PAD)
    expected = trained.encode(text, add_special_tokens=False).ids
    word = trained.encode("word", add_special_tokens=False).ids
    documents = [(text, True), ("word", True)]
    data.write_corpus(documents, str(tmp_path / "hf"), tmp_path / "corpus")
    first = [0] * bool(begin)
    corpus = data.load(tmp_path / "corpus")
    assert ids(corpus) == [*first, *expected, 1, *first, *word, 1]
    encoding = tokenizer.make_tokenizer(corpus.tokenizer)
    assert encoding.encode(text).tolist() == expected
    assert (encoding.begin, encoding.eot_token) == (first, corpus.eot_token)


@pytest.mark.parametrize("begin", ["", "<s>"])
def test_exported_model_continues_as_ours_with_what_stands_in_front_of_a_text(
    transformers, tmp_path, begin
):
    write_tokenizer(tmp_path / "hf", begin)
    documents = [((ROOT / name).read_text(), True) for name in ("README.md", "RESULTS.md")]
    data.write_corpus(documents, str(tmp_path / "hf"), tmp_path / "corpus")
    options = SHAPE | dict(method="minibatch", max_steps=30, lr=0.03, batch_size=4)
    run_training(1, tmp_path / "corpus", out_dir=tmp_path / "run", **options)
    folder = exported(tmp_path / "run" / "model.pt", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    encoding = transformers.AutoTokenizer.from_pretrained(folder)
    first = [0] * bool(begin)
    assert theirs.config.bos_token_id == (0 if begin else None)
    for prompt in "The replicas", "a", "data.py":
        words = encoding(prompt, return_tensors="pt")
        assert words.input_ids[0].tolist()[: len(first) + 1].count(0) == len(first)
        assert words.input_ids[0, -1] != 1  # the text goes on
        written = theirs.generate(**words, max_new_tokens=25, do_sample=False, pad_token_id=1)
        text = encoding.decode(written[0][len(first) :]).removesuffix("</s>")
        for path in tmp_path / "run" / "model.pt", folder:
            model, ours = load(str(path))
            assert continue_text(model, ours, prompt, count=25, temperature=0.0) == text
    # and the other way: their model, their tokenizer, what they put in front
    seen = []
    model.forward_pre_hook = model.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    continue_text(model, ours, "a", count=1)
    assert seen[0].tolist() == [[*first, *ours.encode("a").tolist()]]


FOREIGN = {  # changes of config.json -> what the line says
    "mismatched_keys.*self_attn": dict(head_dim=16),
    "missing_keys.*model.layers.2": dict(num_hidden_layers=3),
    "unexpected_keys.*model.layers.1": dict(num_hidden_layers=1),
    "missing_keys.*self_attn.*bias": dict(attention_bias=True),
    "are llama, gelu, default": dict(hidden_act="gelu"),
    "are mistral, silu, default": dict(model_type="mistral"),
    "are llama, silu, linear": dict(rope_scaling={"type": "linear", "factor": 2.0}),
}


def refused(folder, message):
    with pytest.raises(UserError) as error:
        hf.open_model(str(folder))
    line = str(error.value)
    assert line.startswith(f"{folder} is not a model (") and re.search(message, line), line
    assert "\n" not in line and len(line) < 600


def test_foreign_folders_are_refused_in_one_line(transformers, tmp_path):
    refused(tmp_path, "config.json")
    their_llama(transformers, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for message, change in FOREIGN.items():
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        refused(tmp_path, message)


def test_damaged_folder_is_refused_in_one_line(transformers, tmp_path):
    their_llama(transformers, tmp_path / "hf")
    whole = (tmp_path / "hf" / "model.safetensors").read_bytes()
    (tmp_path / "hf" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "hf", "SafetensorError: Error while")


def test_tokenizer_with_gaps_keeps_marks_in_the_text(transformers):
    vocab = {"a": 0, "b": 1, "</s>": 9}
    template = [{"Sequence": dict(id="A", type_id=0)}, {"SpecialToken": dict(id="</s>", type_id=0)}]
    text = json.dumps({
        "version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": [dict(id=9, content="</s>", special=True, single_word=False, lstrip=False,
                              rstrip=False, normalized=False)],
        "post_processor": {  # it would append </s> to each text
            "type": "TemplateProcessing", "single": template, "pair": template,
            "special_tokens": {"</s>": dict(id="</s>", ids=[9], tokens=["</s>"])},
        },
    })  # fmt: skip
    encoding = tokenizer.make_tokenizer("\n" + text)
    assert (encoding.n_vocab, encoding.eot_token) == (10, 9)
    assert 9 not in encoding.encode("a</s>b").tolist()
    assert "</s>" in encoding.decode([0, 9, 1])


def test_record_is_readable_in_pandas(tmp_path, corpus_folder):
    pandas = pytest.importorskip("pandas")
    run = run_training(1, corpus_folder, out_dir=tmp_path / "run", max_steps=3)
    table = pandas.read_json(tmp_path / "run" / "metrics.jsonl", lines=True)
    assert table[table.event == "step"].loss.tolist() == pytest.approx(run.losses)


# ---- text in ----

DOCUMENTS = ["naïve\r\n\tπ 🙂 <|endoftext|>", "", "a\u2028b", "word " * 30_000, "\ufefflast"]
NON_EMPTY = [(text, True) for text in DOCUMENTS if text]


def write_parquet(path, texts, **options):
    """texts: as a list, or a pyarrow array."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    parquet.write_table(table, path, **options)
    return path


def test_rows_of_a_parquet_file_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    texts = [*DOCUMENTS, None]
    columns = [
        texts,
        pyarrow.array(texts, pyarrow.large_string()),
        pyarrow.array(texts).dictionary_encode(),
    ]
    for texts in columns:
        for options in dict(), dict(row_group_size=2, compression="zstd"):
            path = write_parquet(tmp_path / "a.parquet", texts, **options)
            assert list(data.text_documents([path])) == NON_EMPTY
    path = write_parquet(tmp_path / "A.Parquet", [str(i) for i in range(1000)])
    assert list(data.text_documents([path])) == [(str(i), True) for i in range(1000)]


def test_damaged_and_foreign_parquet_files_are_refused_in_one_line(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "a.parquet", [f"word {i} " * 99 for i in range(1000)])
    whole = path.read_bytes()
    half = len(whole) // 2
    for name, content in (
        ("empty", b""),
        ("cut", whole[:half]),
        ("no-beginning", whole[half:]),
        ("changed", whole[:half] + bytes(1000) + whole[half + 1000 :]),
    ):
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(content)
        check_refused(path, f"--input {path}: ", monkeypatch)
    numbers = write_parquet(tmp_path / "numbers.parquet", [1, 2])
    check_refused(numbers, 'its column "text" has no strings', monkeypatch)
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "other.parquet")
    check_refused(tmp_path / "other.parquet", "--field one of .*content", monkeypatch)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"{}"])
def test_damaged_tokenizer_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match="^tokenizer.json is damaged .*$"):
        data.write_corpus([("a", True)], str(tmp_path), tmp_path / "out")
