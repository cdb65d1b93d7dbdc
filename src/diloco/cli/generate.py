"""`diloco generate`: text that a run's model writes after a prompt."""

from typing import Annotated

import tyro

from diloco.cli._command import Run, call
from diloco.cli._writing import Writing, read_text, show

HELP = "text of a run's model: diloco generate RUN [--prompt TEXT] [--max-tokens N]"
ORDER = 4


def run(arguments: list[str]) -> None:
    """Write with the run that a command line names."""
    call(_generate, arguments, prog="diloco generate")


def _generate(
    run: Run,
    prompt: str = "",
    writing: Annotated[Writing, tyro.conf.arg(name="")] = Writing(),  # noqa: B008
) -> None:
    """Write text after a prompt, with a run's outer parameters; each token is printed as it comes.

    Args:
        run: Directory of the run, over or not, or the URL of the store in which its replicas meet.
        prompt: The text to go on from; left out, the beginning of a document.
        writing: How the text is written.
    """
    from diloco.data.tokenizers import text_pieces
    from diloco.models.writer import generate

    writer, tokenizer = writing.load(run)
    tokens = read_text(writer, tokenizer, prompt)
    print(prompt, end="", flush=True)
    written = generate(writer, writing.max_tokens, stop=tokenizer.bos_id)
    for _ in show(text_pieces(tokenizer, written, after=tokens)):
        pass
    print()
