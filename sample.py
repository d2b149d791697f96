"""Text from a trained model: python sample.py --model out/edit/model.pt --prompt "def "

Also from a folder in Hugging Face's Llama format.
"""

import torch

from config import Parser, UserError, check_limits, printable, run_command
from hf import make_llama, open_model
from plumbing.tokenizer import UNKNOWN, make_tokenizer


def load(path: str):
    """(Llama, tokenizer) from a model.pt or a folder of hf.py. The tokenizer of a model that was
    trained on token files may be None: its logits need none. Raises UserError.

        model, _ = load("out/edit/model.pt")
        logits = model(torch.tensor([[1, 2, 3]]))  # (B, T, V)
    """
    source = open_model(path)
    known = source.tokenizer != UNKNOWN
    tokenizer = make_tokenizer(source.tokenizer) if known else None
    return make_llama(source.config, source.tensors).float(), tokenizer


@torch.no_grad()
def generate(model, tokens: list, count: int, temperature=0.8, top_k=50, seed=0, n_vocab=None):
    """Yield `count` more token ids below n_vocab, each drawn given the last block_size ones.
    temperature 0: the most likely one; top_k 0: draw from all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokens)
    for _ in range(count):
        context = torch.tensor([tokens[-model.config.block_size :]])  # (1, T)
        logits = model(context)[0, -1, :n_vocab].double()  # (V,); a tiny temperature is 0 in fp32
        if 0 < top_k < len(logits):
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        probabilities = torch.softmax(logits / max(temperature, 1e-12), dim=0)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        yield tokens[-1]


def continue_text(model, encoding, prompt: str, **options) -> str:
    """The prompt and the model's continuation. An empty prompt starts a new document. Raises
    UserError if there is no tokenizer (None)."""
    if encoding is None:
        raise UserError("the tokenizer of this model is not known: it has logits, but no text")
    prompt = prompt.encode(errors="replace").decode()  # a terminal may send what is no UTF-8
    tokens = encoding.encode(prompt).tolist()
    # What stood in front of each document in training, if anything. Else the end of another one.
    start = encoding.begin + tokens or [encoding.eot_token]
    for token in generate(model, start, n_vocab=encoding.n_vocab, **options):
        if token == encoding.eot_token:  # the document ends here
            break
        tokens.append(token)
    return encoding.decode(tokens)


def print_sample(path):
    """A short text from a model that train.py has just written."""
    try:
        model, encoding = load(path)
        prompt = "def " if getattr(encoding, "name", "") == "byte" else "The "
        text = continue_text(model, encoding, prompt, count=100)
    except (UserError, ModuleNotFoundError) as error:  # offline: the run itself is fine
        text = f"none: {error}"
    print(f"model   {path}")
    print("sample  " + printable(text, keep="\n\t").replace("\n", "\n        "))


def main():
    parser = Parser(description="Continue a prompt with a model trained by train.py.")
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="a run's model.pt, or a folder of hf.py")
    add("--prompt", default="", help="text to continue (default: a new document)")
    add("--tokens", type=int, default=200, help="number of tokens to write (default: 200)")
    add("--temperature", type=float, default=0.8, help="0: the most likely token (default: 0.8)")
    add("--top_k", type=int, default=50, help="draw from the k most likely; 0: all (default: 50)")
    add("--seed", type=int, default=0, help="seed of the random draws (default: 0)")
    options = vars(parser.parse_args())
    for name, value in options.items():
        check_limits(f"--{name}", value, {})
    model, encoding = load(options.pop("model"))
    count = options.pop("tokens")
    print(printable(continue_text(model, encoding, count=count, **options), keep="\n\t"))


if __name__ == "__main__":
    run_command("sample.py", main)
