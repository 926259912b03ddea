"""Sentences in English with their German translations, from a seed alone, so that a small
translator can be trained and tried without a download.

Words change places: the day moves forward, and the verb of a clause after "weil" to its end. Names
of syllables and numbers of digits are copied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

VERBS = {
    "sees": "sieht",
    "buys": "kauft",
    "sells": "verkauft",
    "finds": "findet",
    "paints": "malt",
    "counts": "zählt",
    "needs": "braucht",
    "repairs": "repariert",
}
NOUNS = {
    "books": "Bücher",
    "chairs": "Stühle",
    "houses": "Häuser",
    "ships": "Schiffe",
    "birds": "Vögel",
    "apples": "Äpfel",
    "clocks": "Uhren",
    "bells": "Glocken",
}
COLOURS = {
    "red": "rote",
    "green": "grüne",
    "blue": "blaue",
    "yellow": "gelbe",
    "black": "schwarze",
    "white": "weiße",
}
DAYS = {"on Monday": "am Montag", "on Friday": "am Freitag", "on Sunday": "am Sonntag"}
PLACES = {"in": "in", "near": "bei", "behind": "hinter"}
JOINTS = {"because": "weil", "and": "und"}
SYLLABLES = [first + second for first in "BDFKLMNRST" for second in "aeiou"]
_TABLES = VERBS, NOUNS, COLOURS, DAYS, PLACES, JOINTS
PAD, END = "<pad>", "<end>"
_WORDS = [word for table in _TABLES for pair in table.items() for word in pair]
_ALL = PAD, END, *"0123456789", ".", ",", *SYLLABLES, *" ".join(_WORDS).split()
VOCABULARY = [*dict.fromkeys(_ALL)]
"""Words of both languages; what both have is one id."""
_IDS = {word: index for index, word in enumerate(VOCABULARY)}


def sentence(seed: int) -> tuple[str, str]:
    """A sentence in English, and in German.

    Example:
        >>> english, german = sentence(2)
        >>> english
        'Da Lo finds 2 6 7 black books behind Ti Si on Friday .'
        >>> german
        'Da Lo findet am Freitag 2 6 7 schwarze Bücher hinter Ti Si .'
    """
    chance = random.Random(seed)
    english, german = _clause(chance, is_last=False)
    if chance.random() < 0.6:
        joint = chance.choice([*JOINTS])
        more = _clause(chance, is_last=joint == "because")
        comma = " ," if joint == "because" else ""
        english, german = (
            f"{english}{comma} {joint} {more[0]}",
            f"{german}{comma} {JOINTS[joint]} {more[1]}",
        )
    return f"{english} .", f"{german} ."


def _clause(chance: random.Random, *, is_last: bool) -> tuple[str, str]:
    """A clause in both languages, the German verb last or second."""
    who, where = (" ".join(chance.sample(SYLLABLES, chance.randint(2, 3))) for _ in range(2))
    number = " ".join(str(chance.randint(10, 10 ** chance.randint(2, 4) - 1)))
    verb, noun, colour, place = (chance.choice([*t]) for t in (VERBS, NOUNS, COLOURS, PLACES))
    day = chance.choice([*DAYS, ""])
    english = [who, verb, number, colour, noun, place, where, day]
    german = [DAYS.get(day, ""), number, COLOURS[colour], NOUNS[noun], PLACES[place], where]
    german = [who, *german, VERBS[verb]] if is_last else [who, VERBS[verb], *german]
    return tuple(" ".join(part for part in parts if part) for parts in (english, german))


def encode(text: str) -> list[int]:
    """Ids of a text, the end behind it."""
    return [_IDS[word] for word in [*text.split(), END]]


def decode(ids: Sequence[int]) -> str:
    """The text of ids, up to its end."""
    words = [VOCABULARY[index] for index in ids]
    words = words[: words.index(END)] if END in words else words
    return " ".join(word for word in words if word != PAD)


def batch(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids `[B, T]` of texts, and their mask."""
    rows = [torch.tensor(encode(text)) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=_IDS[PAD])
    return ids, (ids != _IDS[PAD]).long()
