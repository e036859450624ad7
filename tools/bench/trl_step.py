"""TRL's `GRPOTrainer` on the bench's work. Runs in the environment that `peer.py` makes, alone, and knows no Offbeat.

    python trl_step.py OPTIONS.json

`OPTIONS.json` holds what `peer.run` writes; the answer goes to its "answer" file: seconds of each step, versions.
"""

# TRL, datasets and transformers live in another environment than the type checker's.
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    """Train as the options in file `path` say and write the answer."""
    options = json.loads(Path(path).read_text())
    # Read by OpenMP when torch is imported.
    os.environ["OMP_NUM_THREADS"] = str(options["threads"])
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    import torch

    torch.set_num_threads(options["threads"])
    trainer, clock = _trainer(options)
    trainer.train()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    answer = {
        "step_s": clock.seconds,
        "generate_and_reward_s": trainer.making_s,
        "completion_tokens": trainer.completion_tokens,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
    }
    Path(options["answer"]).write_text(json.dumps(answer))


def _trainer(options: dict[str, Any]) -> tuple[Any, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        """Seconds from the end of one optimizer step to the end of the next."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._last = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            if not self._last:
                self._last = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now

    class Timed(GRPOTrainer):
        """The trainer as it is, with a watch beside the one call that makes completions and scores them."""

        making_s: list[float]
        completion_tokens: list[int]

        def _generate_and_score_completions(self, inputs: Any) -> Any:  # noqa: ANN401
            started = time.perf_counter()
            scored = super()._generate_and_score_completions(inputs)
            self.making_s.append(time.perf_counter() - started)
            self.completion_tokens.append(int(scored["completion_mask"].sum()))
            return scored

    rows = [json.loads(line) for line in Path(options["prompts"]).read_text().splitlines()]
    model, tokenizer = _model(options["model"])
    clock = Clock()
    trainer = Timed(
        model=model,
        reward_funcs=_reward(options["reward"]),
        args=_arguments(options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.making_s = []
    trainer.completion_tokens = []
    return trainer, clock


def _model(path: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    # TRL cannot do without an end token. This one lies behind the model's vocabulary: it is never sampled.
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer


def _arguments(options: dict[str, Any]) -> Any:  # noqa: ANN401
    from trl import GRPOConfig

    work = options["work"]
    completions = work["prompts_per_step"] * work["group_size"]
    return GRPOConfig(
        output_dir=options["scratch"],
        use_cpu=True,
        bf16=False,
        max_steps=options["steps"],
        per_device_train_batch_size=options["micro_batch"],
        gradient_accumulation_steps=completions // options["micro_batch"],
        num_generations=work["group_size"],
        max_completion_length=work["completion_tokens"],
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        epsilon=work["clip_low"],
        epsilon_high=work["clip_high"],
        loss_type="dapo",  # the mean over all tokens of the step, as ours
        scale_rewards="group",
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta1=work["beta1"],
        adam_beta2=work["beta2"],
        max_grad_norm=work["max_grad_norm"],
        gradient_checkpointing=False,  # on by default there; memory is no concern here, and off is faster
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=work["seed"],
    )


def _reward(path: str) -> Any:  # noqa: ANN401
    """Return the reward function in file `path` in the form TRL calls."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("reward", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(completions: list[str], **_: object) -> list[float]:
        return [module.share_of_good(completion) for completion in completions]

    return reward


if __name__ == "__main__":
    main(sys.argv[1])
