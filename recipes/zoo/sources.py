"""What the zoo is trained on beside the standard library.

The library is small (8 MB, 3 M tokens): a 3.7 M parameter model that sees it twenty times over
learns it by heart. So the sources of specdec's own dependencies, and of theirs, are read as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from specdec.lab.training.data import encode_texts
from specdec.lab.zoo.corpus import read_source, sources_of

# Packages that torch and transformers bring along, themselves included.
PACKAGES = (
    "torch", "transformers", "accelerate", "huggingface_hub", "numpy", "networkx", "sympy",
    "jinja2", "fsspec",
)  # fmt: skip
# Hundreds of copies of one architecture, and one of the rest of the package in size.
SKIPPED_IN_PACKAGES = ("models/**/*.py", "sparse/_triton_ops_meta.py", "polys/benchmarks/*.py")


def package_files() -> list[Path]:
    """The sources of the installed `PACKAGES`, package by package, without tests and tables."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    roots = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations]
    return [path for root in roots for path in sources_of(root, skipped=SKIPPED_IN_PACKAGES)]


def encode_files(tokenizer: PreTrainedTokenizerFast, files: Iterable[Path]) -> list[np.ndarray]:
    """Ids of each file, closed by the end-of-text token."""
    return encode_texts(map(read_source, files), tokenizer)
