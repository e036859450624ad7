"""Tasksets of verifiers v1, as they are: `environment.rollout=offbeat_recipes.library.verifiers:Verifiers environment.args.taskset=gsm8k`.

They run in a process with Python packages of its own (`scripts/verifiers.py`). Its train client asks the endpoint of a harness for
tokens, which are trained as they were sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_recipes.library.process import ProcessHarness
from offbeat_trainer.data.types import Score, is_correct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offbeat_recipes.library.harness import Endpoint
    from offbeat_trainer import Prompt
    from offbeat_trainer.rollouts.own import RolloutSetup


class Verifiers(ProcessHarness):
    """Each row of the run's task is the data of one of verifiers' tasks; `scripts/verifiers.py` writes such rows.

    `command` runs the script, which it is given: uv, or a Python that has verifiers and transformers. `env` are further settings of
    verifiers' environment (`agent.runtime.type=subprocess`), `renderer` those of the renderer (`name=qwen3`), where the model's
    name does not tell which.
    """

    scores_itself = True
    library = "verifiers"
    script = Path(__file__).with_name("scripts") / "verifiers.py"

    def __init__(
        self,
        setup: RolloutSetup,
        *,
        taskset: str,
        command: Sequence[str] = ("uv", "run", "--script"),
        renderer: Mapping[str, Any] | None = None,
        **env: object,
    ) -> None:
        """Play `taskset`."""
        super().__init__(setup, command, {**env, "taskset": {"id": taskset}})
        tokenizer: Any = self._task.tokenizer
        self._client = {"renderer_model_name": tokenizer.name_or_path, "renderer": renderer}

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        """Have one episode played over there."""
        client = {**self._client, "base_url": endpoint.base_url, "headers": {"x-api-key": endpoint.api_key}}
        found = await self.ask({"client": client, "model": endpoint.model, "row": dict(prompt.data)})
        return Score(reward=found["reward"], correct=is_correct(found["reward"], None), parts=found["parts"])
