"""Commands certify samplers over few worlds here (`tests/certify` is about these), and small
models.
"""

import pytest
from architectures import build

from specdec import zoo
from specdec.certify.sampler import exact


@pytest.fixture(autouse=True)
def _few_worlds(monkeypatch):
    monkeypatch.setattr(exact, "SIZES", ((2, 1, 2),))


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> str:
    """A folder of a small model with the zoo's tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("small"), zoo.load_tokenizer()
    model = build("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
