"""A hidden word, to be guessed in several turns: `adfh:` shows the letters that it may have, and each guess is marked letter by letter.

    policy        daf      game  ?+-;      d elsewhere, a here, f nowhere
    policy        had      game  (found)

A word that is found is worth 1, and a tenth less for each guess before. The careless hand says its first word again, whatever the marks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offbeat_recipes.tasks.chars import CharTask
from offbeat_rollout import Finish
from offbeat_trainer import Action, Feedback, Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from offbeat_recipes.tasks.chars import Past
    from offbeat_recipes.tasks.text import Messages

LETTERS = "abcdefgh"
HERE, ELSEWHERE, NOWHERE, UNREADABLE = "+?-!"
MARKS_END = ";"
_PRICE = 0.1
"""What each guess but the last costs."""


def marks(word: str, guess: str) -> str:
    """Return a mark for each letter of `guess`; a letter is elsewhere as often as `word` has it outside the places that are right."""
    left = Counter(letter for letter, other in zip(word, guess, strict=True) if letter != other)
    said = ""
    for letter, other in zip(word, guess, strict=True):
        here = letter == other
        said += HERE if here else ELSEWHERE if left[other] > 0 else NOWHERE
        left[other] -= not here
    return said


class WordGame:
    """The environment: it hides a word and marks guesses."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin with `prompt`."""
        del seed
        self._word, self._letters = str(prompt.data["word"]), set(prompt.text[:-1])
        self._left = int(str(prompt.data["guesses"]))
        return ""

    def step(self, action: Action) -> Feedback:
        """Return the marks of a guess; what is no word of the letters costs a guess, too."""
        self._left -= 1
        guess = action.text
        if guess == self._word and action.finish == Finish.STOP:
            return Feedback(reward=1 - _PRICE * action.turn, correct=True, done=True)
        if not self._left:
            return Feedback(correct=False, done=True)
        readable = len(guess) == len(self._word) and set(guess) <= self._letters
        return Feedback(
            observation=(marks(self._word, guess) if readable else UNREADABLE * len(self._word)) + MARKS_END
        )


class WordGameTask(CharTask):
    """Words of `config.length` letters out of `config.letters`, found in `config.guesses` or not at all."""

    alphabet = f"{LETTERS}:{HERE}{ELSEWHERE}{NOWHERE}{UNREADABLE}{MARKS_END}"
    environment = WordGame

    def ask(self, rng: np.random.Generator) -> tuple[str, dict[str, object]]:
        """Draw letters, and a word of them."""
        letters = "".join(sorted(rng.choice(list(LETTERS), size=self.config.letters, replace=False)))
        word = "".join(rng.choice(list(letters), size=self.config.length))
        return f"{letters}:", {"word": word, "guesses": self.config.guesses}

    def key(self, asked: str | Messages, data: Mapping[str, object]) -> str:
        """Return letters and word: a word may be hidden among other letters, too."""
        return f"{asked}{data['word']}"

    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return some word first, then what was marked as right and the next letter elsewhere; a careless hand its first word again."""
        letters = prompt.text[:-1]
        if not past:
            return "".join(rng.choice(list(letters), size=self.config.length))
        if careless:
            return past[0][0]
        following = dict(zip(letters, letters[1:] + letters[0], strict=True))
        return "".join(one if mark == HERE else following[one] for one, mark in zip(*past[-1], strict=False))

    def lengths(self) -> tuple[int, int]:
        """See `CharTask.lengths`."""
        length, guesses = self.config.length, self.config.guesses
        return self.config.letters + 1, guesses * (length + 1) + (guesses - 1) * (length + 1)
