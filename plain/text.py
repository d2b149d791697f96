"""What train.py trains, for the loop of train.py here: a Llama on the windows of a text.

Sharded twins: train.py (make_model, make_batches), plumbing/simulate.py (--random_tokens).
"""

import numpy as np
import torch

import data
from config import padded_vocabulary
from model import Llama, ModelConfig
from plain.method import hits
from plain.train import Training


def model_config(f, corpus) -> ModelConfig:
    shape = {name: getattr(f, name) for name in ModelConfig.__dataclass_fields__}
    shape["vocab_size"] = padded_vocabulary(f, corpus.vocab_size)
    return ModelConfig(**shape)


def text_training(f, M, N, corpus, parameters=None, listen=None, sick=None) -> Training:
    """parameters: name -> tensor, to start from, as model.Llama names them; by default those that
    --seed draws. The rest: as in Training."""
    llama = Llama(model_config(f, corpus), f.seed)
    if parameters:
        llama.load_state_dict(parameters)
    if f.data_by_replica:
        corpus = corpus.by_replica(M, f.block_size)

    def batches(step, micro_step, rank):
        return windows(f, corpus, step, micro_step, rank, M, N)

    sizes = (f.block_size, data.VALIDATION_ROWS)
    held_out = data.Batches(corpus, *sizes, device=torch.device(f.device))
    validation = list(held_out.validation(f.eval_batches))
    return Training(f, llama.layers, batches, M, N, validation, listen=listen, sick=sick)


def windows(f, corpus, step, micro_step, rank, M, N):
    """Inputs and targets of a rank in a micro-step; with --random_tokens uniform random tokens."""
    sizes = (f.block_size, f.batch_size, f.accum, rank, M * N)
    batches = data.Batches(corpus, *sizes, f.seed, torch.device(f.device))
    inputs, targets = batches.train(step, micro_step)
    if not hits(f.random_tokens, rank // N, step + 1):
        return inputs, targets
    # The third number: 0 draws the batches, 2 NoLoCo's pairs.
    counter = [0, micro_step * N + rank % N, 3, step]
    generator = np.random.Generator(np.random.Philox(key=f.seed, counter=counter))
    tokens = generator.integers(corpus.vocab_size, size=(2, *inputs.shape))
    return torch.from_numpy(tokens).to(f.device).unbind()
