"""What HF's `Trainer` and its settings do for a training, beside what they document."""

from transformers import TrainingArguments


def train_on_one_gpu(args: TrainingArguments) -> None:
    """As HF does for models that its DataParallel cannot copy. Under another name the field has no
    effect, and a process that sees several GPUs fails in DataParallel.
    """
    args._n_gpu = min(args.n_gpu, 1)
