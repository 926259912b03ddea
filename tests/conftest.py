"""Shared settings of the tests."""

import os

import hypothesis
import torch
import transformers

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined, on import

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny tensors: a second thread only adds waiting

hypothesis.settings.register_profile("gate", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile("gate")
