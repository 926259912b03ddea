"""`specdec train`: from text to a head, with Hugging Face's `Trainer`."""

from typer import Context

from specdec.lab.cli.training_options import Run


def train(context: Context, run: Run) -> None:
    """Train a head: specdec train eagle3 --target ... --data ... --output ...

    It runs unchanged under accelerate launch -m specdec train ... (on CPUs: with
    ACCELERATE_USE_CPU=true and --multi_gpu --num_processes 2; with --cpu it starts one process,
    whatever the arguments are). Evaluation drafts with the head and prints its true acceptance
    length; the texts that it continues are kept from training. A run that was interrupted goes on
    when it is started again.

    Any other option is a field of Hugging Face's TrainingArguments, --report_to wandb for
    instance, and comes before what the options below say.
    """
    from specdec.lab.cli.training_run import train

    train(run, context.args)
