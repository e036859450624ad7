r"""A model as a judge, behind any endpoint that speaks OpenAI's chat completions.

```python
# mine.py: task.reward=mine.py:good
from offbeat_recipes.library.judge import Judge
good = Judge(url="http://judge:8000/v1", model="qwen", ask="Question: {prompt}\nAnswer: {completion}\nIs it right? Say a number from 0 to 10.")
```
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class BudgetSpentError(RuntimeError):
    """A judge may ask no more."""


@dataclass(slots=True, kw_only=True)
class Judge:
    """A reward: the last number that the model says, over `best`, held between 0 and 1; none is a failure, which is tried again.

    `ask` is what is said to it, with `{prompt}`, `{completion}` and the columns of the row; `key` names the environment variable of its key.
    An endpoint that is busy or away is asked again after 1 s, 2 s, 4 s, ... or when it says, for `patience_s` in all, which `reward.timeout_s`
    should be longer than. The same question is asked once: the newest `remembers` answers are kept. `budget` bounds the answers that are
    paid for in one process of rewards; 0: none.
    """

    url: str
    model: str
    ask: str
    best: float = 10.0
    key: str = "JUDGE_API_KEY"
    patience_s: float = 45.0
    max_tokens: int = 512
    concurrency: int = 32
    remembers: int = 100_000
    budget: int = 0
    num_answers: int = 0
    _known: OrderedDict[str, asyncio.Future[float]] = field(
        default_factory=OrderedDict[str, "asyncio.Future[float]"]
    )
    _client: httpx.AsyncClient | None = None
    _turns: asyncio.Semaphore | None = None

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, object]) -> float:
        """Return what the judge says of a completion.

        Raises:
            BudgetSpentError: it may ask no more.
            RuntimeError: it was away for too long, refused the question, or said no number.
        """
        question = self.ask.format(**{**row, "prompt": prompt, "completion": completion})
        if question not in self._known:
            self._known[question] = asyncio.ensure_future(self._answer(question))
            while len(self._known) > self.remembers:
                self._known.popitem(last=False)
        self._known.move_to_end(question)
        try:
            return await asyncio.shield(self._known[question])
        except Exception:
            self._known.pop(question, None)  # another try asks again
            raise

    async def close(self) -> None:
        """Close its connections; the process of the rewards just ends."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _answer(self, question: str) -> float:
        if self._turns is None:
            self._turns = asyncio.Semaphore(self.concurrency)
        async with self._turns:
            text = await self._text(question)
        numbers = _NUMBER.findall(text)
        if not numbers:
            raise RuntimeError(f"the judge said no number: {text!r:.200}")
        return min(1.0, max(0.0, float(numbers[-1]) / self.best))

    async def _text(self, question: str) -> str:
        if self._client is None:
            key = os.environ.get(self.key, "")  # noqa: TID251 - the user's own
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._client = httpx.AsyncClient(headers=headers, timeout=self.patience_s)
        messages = [{"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        until_s, pause_s, why = time.monotonic() + self.patience_s, 1.0, ""
        while True:
            if self.budget and self.num_answers >= self.budget:
                raise BudgetSpentError(f"the judge's budget of {self.budget} answers is spent")
            wait_s = pause_s
            try:
                response = await self._client.post(f"{self.url}/chat/completions", json=body)
                if response.status_code not in _BUSY:
                    return self._text_of(response)
                why = f"status {response.status_code}"
                wait_s = _seconds(response.headers.get("retry-after")) or pause_s
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            if time.monotonic() + wait_s > until_s:
                raise RuntimeError(f"the judge at {self.url} was away for {self.patience_s:g} s ({why})")
            await asyncio.sleep(wait_s)
            pause_s *= 2

    def _text_of(self, response: httpx.Response) -> str:
        if response.is_error:
            raise RuntimeError(f"the judge refused: status {response.status_code}, {response.text:.200}")
        self.num_answers += 1
        answer: Any = response.json()
        return str(answer["choices"][0]["message"]["content"])


def _seconds(header: str | None) -> float:
    """Return the seconds of a header, 0 where it is a date or not there."""
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0
