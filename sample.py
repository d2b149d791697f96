"""Text from a trained model: python sample.py --model out/edit/model.pt --prompt "def "

`model.pt`, written by train.py, is a dictionary of plain values and tensors, loaded without
executing anything in it: `model` (state dict of model.Llama, fp32), `model_config` (fields of
ModelConfig), `tokenizer` (its name), `config` (the run's flags).
"""

import sys

import torch

from data import tokenizer
from flags import Parser, UserError
from model import Llama, ModelConfig


def load_model(path: str, device="cpu"):
    """(Llama, tiktoken.Encoding) from a model.pt. Raises UserError if it is no such file."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise UserError(
            f"--model {path}: {error.strerror}; train.py writes it as OUT_DIR/model.pt"
        ) from None
    except Exception as error:  # truncated archives and foreign pickles raise many kinds
        raise UserError(
            f"--model {path}: not a model.pt of train.py ({type(error).__name__})"
        ) from None
    try:
        model = Llama(ModelConfig(**saved["model_config"])).to(device)
        model.load_state_dict(saved["model"])
        name = saved["tokenizer"]
    except Exception as error:  # a file of somebody else's, whatever is in it
        raise UserError(
            f"--model {path}: not a model.pt of train.py ({type(error).__name__})"
        ) from None
    return model, tokenizer(name)


@torch.no_grad()
def generate(model, tokens: list, count: int, temperature=0.8, top_k=50, seed=0):
    """Yield `count` more token ids, each drawn given the last block_size ones.
    temperature 0: the likeliest."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokens)
    for _ in range(count):
        context = torch.tensor([tokens[-model.config.block_size :]], device=device)  # (1, T)
        logits = model(context)[0, -1].float().cpu()  # (V,)
        if not logits.isfinite().all():
            raise UserError("the model's output is not finite: its training has diverged")
        logits -= logits.max()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            if 0 < top_k < len(logits):
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            choice = torch.multinomial(
                torch.softmax(logits / temperature, dim=0), 1, generator=generator
            )
            tokens.append(int(choice))
        yield tokens[-1]


def continue_text(model, encoding, prompt: str, **options) -> str:
    """The prompt and what the model writes after it. An empty prompt starts a new document."""
    tokens = encoding.encode(prompt, disallowed_special=())
    start = tokens or [encoding.eot_token]
    for token in generate(model, start, **options):
        if token == encoding.eot_token:  # the document ends here
            break
        tokens.append(token)
    return encoding.decode(tokens, errors="replace")


def main():
    parser = Parser(description="Continue a prompt with a model trained by train.py.")
    parser.add_argument("--model", required=True, metavar="FILE", help="a run's model.pt")
    parser.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    parser.add_argument(
        "--tokens", type=int, default=200, help="number of tokens to write (default: 200)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest (default: 0.8)"
    )
    parser.add_argument(
        "--top_k", type=int, default=50, help="draw from so many likeliest, 0: all (default: 50)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    try:
        args = parser.parse_args()
        if not (
            args.tokens >= 0
            and 0 <= args.temperature < float("inf")
            and args.top_k >= 0
            and 0 <= args.seed < 2**63
        ):
            raise UserError(
                "--tokens, --temperature, --top_k and --seed cannot be negative, NaN or too large"
            )
        model, encoding = load_model(args.model)
        longest = model.config.block_size
        length = len(encoding.encode(args.prompt, disallowed_special=()))
        if length > longest:
            print(
                f"sample.py: note: of {length} prompt tokens the model sees the last {longest}",
                file=sys.stderr,
            )
        options = dict(
            count=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed
        )
        print(continue_text(model, encoding, args.prompt, **options))
    except UserError as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
