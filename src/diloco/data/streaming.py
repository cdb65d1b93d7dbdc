"""Text of tokens as they come, each piece as soon as its characters are whole."""

from collections.abc import Iterable, Iterator, Sequence

from diloco.data.tokenizers import Tokenizer

_MOST_TOKENS_OF_A_CHARACTER = 8
"""Most tokens of a character: its four bytes may be one each, and a tokenizer may put others before them."""


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
    """The text of tokens in pieces, which joined are the text of all.

    Args:
        tokenizer: of the tokens.
        ids: the tokens as they come.
        after: tokens that stand before them; some tokenizers begin a text in another way than they go on.

    >>> from diloco.data.tokenizers import ByteTokenizer
    >>> list(text_pieces(ByteTokenizer(), "né!".encode()))
    ['n', 'é', '!']
    """
    before, pending = [*after[-_MOST_TOKENS_OF_A_CHARACTER:]], []
    for token in ids:
        pending.append(token)
        text = _text_of(tokenizer, before, pending)
        if text and (not text.endswith("\ufffd") or len(pending) >= _MOST_TOKENS_OF_A_CHARACTER):
            yield text
            before, pending = pending, []
    if pending and (text := _text_of(tokenizer, before, pending)):
        yield text


def _text_of(tokenizer: Tokenizer, before: list[int], pending: list[int]) -> str:
    return tokenizer.decode([*before, *pending])[len(tokenizer.decode(before)) :]
