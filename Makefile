# make train: EDiT on four CPU ranks;  make test: the test suite. Both set up .venv first.
PYTHON ?= python3
BIN = .venv/bin

train: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 4 train.py --method edit --shards 2 --device cpu --overwrite

test: .venv/ready
	$(BIN)/python -m pytest

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: train test
