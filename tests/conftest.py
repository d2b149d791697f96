import os
import random
import sys

# before torch is imported, here and in every process started from here
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ["PYTHONPATH"] = os.pathsep.join(
    sys.path[:1] + os.environ.get("PYTHONPATH", "").split(os.pathsep)[:1]
)

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory):
    """The working directory: in the project's, `make train` leaves out/edit."""
    os.chdir(tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    """A small corpus on disk: sentences of words that a seed draws, byte tokens."""
    import data

    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(1)
    words = ["".join(draw.choices("aeinorst", k=draw.randint(2, 7))) for _ in range(300)]
    (folder / "text.txt").write_text(" ".join(draw.choices(words, k=16000)))
    data.write_corpus(data.text_documents([folder / "text.txt"]), "byte", folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="session")
def corpus(corpus_folder):
    import data

    return data.load(str(corpus_folder))
