"""What tasks of characters share: prompts that are drawn, worked examples of a hand that errs, an environment that answers.

The model is a tiny Qwen2, made on the spot as an ordinary Hugging Face folder, with a tokenizer of one token per character.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportArgumentType=false

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from offbeat_recipes.errors import TaskError
from offbeat_recipes.tasks.config import HEAD_DIM, USUAL_HEADS
from offbeat_recipes.tasks.generated import Drawn
from offbeat_recipes.tasks.rows import Stream, stream
from offbeat_rollout import Finish
from offbeat_trainer import Action, Example, Prompt, Score

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    from offbeat_recipes.tasks.config import CharTaskConfig
    from offbeat_trainer import Trajectory

    Past: TypeAlias = Sequence[tuple[str, str]]


class CharTask(Drawn):
    """A subclass says what is asked (`ask`), what a hand says to it (`say`), how long that is (`lengths`), and which environment answers.

    A share `careless` of the worked examples come from a careless hand. Greedily, a policy that imitates both is careless; what care is
    worth, reinforcement learning has to find out.
    """

    alphabet: ClassVar[str]
    """The characters of all its texts."""
    environment: ClassVar[Any] = None
    """One of plain functions that says nothing before the first turn; None for a task of one turn that something else scores."""

    def __init__(
        self, config: CharTaskConfig, model_path: str, seed: int, *, trust_remote_code: bool = False
    ) -> None:
        """Take the model's shape from `config`; `model_path` names a model instead of a fresh one, `seed` decides the order of prompts.

        Its tokens are compared with this task's, and no code of the folder runs.

        Raises:
            TaskError: a share or a shape that cannot be.
        """
        if not 0 < config.held_out_fraction < 1:
            raise TaskError(
                f"task.held_out_fraction: expected more than 0 and less than 1, got {config.held_out_fraction}"
            )
        del trust_remote_code
        self.config, self._seed = config, seed
        self.max_prompt_tokens, self.max_answer_tokens = self.lengths()
        config = config.shaped()
        if config.hidden_size % (2 * config.num_heads):
            raise TaskError(
                f"task.hidden_size {config.hidden_size} must be a multiple of twice task.num_heads "
                f"({config.num_heads}): rotary positions turn pairs of each head's dimensions"
            )
        self.notes: tuple[str, ...] = ()
        if config.num_heads != USUAL_HEADS and not model_path:
            made = (
                f"its model has {config.num_heads} attention heads and a hidden size of {config.hidden_size}"
            )
            self.notes = (f"{made}; {USUAL_HEADS} and {USUAL_HEADS * HEAD_DIM} are usual",)
        self._shape_config = config
        self._model_path = model_path

    @abstractmethod
    def ask(self, rng: np.random.Generator) -> tuple[str, Mapping[str, object]]:
        """Return a prompt's text, drawn with `rng` alone, and what the environment needs to know of it: plain values."""

    @abstractmethod
    def say(self, prompt: Prompt, past: Past, rng: np.random.Generator, *, careless: bool) -> str:
        """Return what a hand says to `prompt` after `past`: its turns before, each with what the environment answered."""

    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Return the numbers of tokens of the longest prompt, and of a careful hand's longest turns with what they are answered."""

    def examples(self, step: int, num_examples: int) -> list[Example]:
        """Return worked examples of training prompts; what the environment says in them is not trained."""
        return self._worked(stream(self._seed, Stream.EXAMPLES, step), num_examples, held_out=False)

    def validation_examples(self, num_examples: int) -> list[Example]:
        """Return worked examples of held-out prompts, the same whatever the run's seed."""
        return self._worked(stream(0, Stream.HELD_OUT, 1), num_examples, held_out=True)

    def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Return what the environment says of the turns of `trajectory`: for tasks of one turn, and for runs without the environment."""
        environment, rewards = self.environment(), 0.0
        environment.reset(prompt, 0)
        for place, turn in enumerate(trajectory.turns):
            feedback = environment.step(
                self._action(place, turn.completion.token_ids.tolist(), turn.completion.finish)
            )
            rewards += feedback.reward
            if feedback.done:
                return Score(reward=rewards, correct=feedback.correct)
        return Score(reward=rewards, correct=False)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token per character; see `offbeat_recipes.tasks.chars`."""
        return char_tokenizer(self.alphabet)

    @cached_property
    def shape(self) -> CharModelShape:
        """The shape of the model that the task makes."""
        config = self._shape_config
        return CharModelShape(
            alphabet=self.alphabet,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            # In wide models larger weights magnify each rounding from layer to layer.
            initializer_range=min(0.1, config.hidden_size**-0.5),
        )

    def model_folder(self, cache_dir: Path, seed: int) -> Path:
        """Return a folder with a model of `shape`, its weights drawn from `seed`; made where it is not there.

        Raises:
            TaskError: a model was named, and its tokens are not this task's.
        """
        if not self._model_path:
            return char_model_folder(self.shape, cache_dir, seed)
        if folder_vocabulary(Path(self._model_path)) != self.tokenizer.get_vocab():
            raise TaskError(
                f"model.path: {self._model_path} has not the tokens of this task ({self.alphabet})"
            )
        return Path(self._model_path)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the characters of `token_ids`, without the end token."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the end token."""
        end = self.tokenizer.eos_token_id
        assert isinstance(end, int)
        return (end,)

    def _worked(self, rng: np.random.Generator, num_examples: int, *, held_out: bool) -> list[Example]:
        # One by one: a batch may have more of them than a small task has prompts.
        return [self._example(self._drawn(rng, 1, held_out=held_out)[0], rng) for _ in range(num_examples)]

    def _example(self, prompt: Prompt, rng: np.random.Generator) -> Example:
        """Let the hand and the environment speak in turn until that is done."""
        careless = bool(rng.random() < self.config.careless)
        environment, past = self.environment and self.environment(), list[tuple[str, str]]()
        if environment:
            environment.reset(prompt, 0)
        ids, trained = list[int](), list[bool]()
        while True:
            said = self.say(prompt, past, rng, careless=careless)
            turn = (*self._encode(said), *self.stop_token_ids())
            ids += turn
            trained += [True] * len(turn)
            feedback = environment and environment.step(self._action(len(past), turn, Finish.STOP))
            if feedback is None or feedback.done:
                return Example(prompt_ids=prompt.token_ids, completion_ids=tuple(ids), trained=tuple(trained))
            past.append((said, str(feedback.observation)))
            answer = self._encode(past[-1][1])
            ids += answer
            trained += [False] * len(answer)

    def _action(self, turn: int, token_ids: Sequence[int], finish: Finish) -> Action:
        return Action(turn=turn, text=self.decode(token_ids), token_ids=tuple(token_ids), finish=finish.value)

    def _prompts_of(self, found: Mapping[str, Any]) -> list[Prompt]:
        return [
            Prompt(uid=f"{self.config.name}:{key}", text=text, token_ids=self._encode(text), data=data)
            for key, (text, data) in found.items()
        ]

    def _raw(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._ids[character] for character in text)

    @cached_property
    def _ids(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        return {character: vocabulary[character] for character in self.alphabet}


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a folder beside `folder` and rename it last; whoever finds `folder` finds it whole.

    Another process may make the same folder at the same time: the first one wins, the other's is dropped.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had the same id
    beside.mkdir(parents=True)
    try:
        fill(beside)
        _put(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already if it was put in place


def random_model_folder(shape: Path, cache_dir: Path, seed: int, *, trust_remote_code: bool = False) -> Path:
    """Return a Hugging Face folder with the config and tokenizer of `shape` and weights drawn from `seed`.

    Made in `cache_dir` where it is not there yet; two calls with one seed give the same weights.
    """
    folder = cache_dir / f"random-{seed}"
    if folder.exists():
        return folder

    def fill(beside: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
            made = cast("Any", AutoConfig).from_pretrained(shape, **trust)
            AutoModelForCausalLM.from_config(made, **trust).save_pretrained(beside)
        for file in shape.iterdir():
            if "token" in file.name or file.suffix in {".jinja", ".model"}:
                shutil.copy(file, beside)

    make_whole(folder, fill)
    return folder


def _put(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_SPECIALS = (PAD, EOS, UNK)


@dataclass(frozen=True, slots=True, kw_only=True)
class CharModelShape:
    """Everything that decides the folder but its seed. One token per character of `alphabet`, in order."""

    alphabet: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    initializer_range: float = 0.1
    rope_theta: float = 100.0
    max_positions: int = 512


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer with one token per character of `alphabet`, after <pad>, <eos> and <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*_SPECIALS, *alphabet))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def folder_vocabulary(folder: Path) -> dict[str, int]:
    """Return the vocabulary of the tokenizer in `folder`; empty when it has none.

    Raises:
        TaskError: its file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise TaskError(f"model.path: the tokenizer in {folder} cannot be read: {said}") from error


def char_model_config(shape: CharModelShape) -> Qwen2Config:
    """Return the configuration of the tiny model: tied embeddings, rotary positions, no dropout."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(_SPECIALS) + len(shape.alphabet),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=_SPECIALS.index(PAD),
        eos_token_id=_SPECIALS.index(EOS),
        bos_token_id=None,
        dtype="float32",
    )


def char_model_folder(shape: CharModelShape, cache_dir: Path, seed: int) -> Path:
    """Return a folder with config, tokenizer and weights drawn from `seed`, making it where it is not there.

    The folder's name is a digest of shape and seed. It is written beside and renamed last: whoever finds it
    finds it whole.
    """
    digest = hashlib.sha256(json.dumps([asdict(shape), seed]).encode()).hexdigest()[:12]
    folder = cache_dir / f"char-model-{digest}"
    if folder.is_dir():
        return folder
    make_whole(folder, lambda beside: _write_model(shape, beside, seed))
    return folder


def _write_model(shape: CharModelShape, folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of our business
        torch.manual_seed(seed)
        Qwen2ForCausalLM(char_model_config(shape)).save_pretrained(folder)
    char_tokenizer(shape.alphabet).save_pretrained(folder)
