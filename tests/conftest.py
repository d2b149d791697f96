import os
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


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    """A small corpus on disk: this repository's own source, byte tokens."""
    import data
    from ranks import ROOT

    folder = tmp_path_factory.mktemp("corpus") / "tokens"
    data.write_corpus(data.text_documents(sorted(ROOT.glob("*.py"))), "byte", folder)
    return folder


@pytest.fixture(scope="session")
def corpus(corpus_folder):
    import data

    return data.load(str(corpus_folder))
