import os
import random
import signal
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)

# A shell starts a job in the background with SIGINT ignored, and nohup ignores SIGHUP. The tests send
# both.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# before torch is imported, here and in every process started from here
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, ROOT)
python_path = [ROOT]
if "PYTHONPATH" in os.environ:
    python_path.append(os.environ["PYTHONPATH"])
os.environ["PYTHONPATH"] = os.pathsep.join(python_path)

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory):
    """The working directory: in the project's, `make train` leaves out/edit."""
    os.chdir(tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    """A small corpus on disk: words that a seed draws, byte tokens."""
    import data

    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(1)
    words = []
    for _ in range(300):
        letters = draw.choices("aeinorst", k=draw.randint(2, 7))
        words.append("".join(letters))

    text = folder / "text.txt"
    text.write_text(" ".join(draw.choices(words, k=16000)))
    data.write_corpus(data.text_documents([text]), "byte", folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="session")
def corpus(corpus_folder):
    import data

    return data.load(str(corpus_folder))
