"""The thread that generates. Everything it owns changes between two tokens, by commands that run in that thread."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed loosely.

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from offbeat_rollout.errors import ConfigError, EngineStateError
from offbeat_rollout.hf.cache import ATTENTION_NAME, Recorder
from offbeat_rollout.hf.decode import RunningBatch, new_row
from offbeat_rollout.hf.model import WholeWeights, check_given, dtype_name, load_model
from offbeat_rollout.interface import eos_token_ids
from offbeat_rollout.toolkit.clock import Work
from offbeat_rollout.toolkit.stop_strings import StopStrings, load_tokenizer
from offbeat_rollout.toolkit.weight_files import lora_layers, lora_specs, names_of
from offbeat_rollout.types import Finish, GenerateRequest, PauseMode, SamplingParams

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable, Sequence

    from transformers import PreTrainedModel

    from offbeat_rollout.config import LoraConfig, RolloutConfig
    from offbeat_rollout.hf.decode import Row
    from offbeat_rollout.types import Completion

    Answer = tuple[Completion, asyncio.Future[Completion]]
    """A completion, and who waits for it."""

T = TypeVar("T")


_PROMPTS, _STEPS = (19, 5), 6
# Of the median: a router may choose otherwise once. Right paths came to 1e-5 here, in bfloat16 to 0.11, wrong ones to 0.15 and more.
_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.3}


def require_plain(model: PreTrainedModel, config: RolloutConfig) -> None:
    """Refuse a model that does not generate here what its plain forward says.

    Raises:
        ConfigError: it has something that this adapter's attention, cache or positions leave out.
    """
    name = type(model).__name__
    try:
        rows = _generated(model, config.max_model_len)
        model.set_attn_implementation("eager")
        gaps = [gap for row in rows for gap in _gaps(model, row)]
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"the hf adapter cannot run {name}: {error!r}; use vllm") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    apart = median(gaps)
    if not apart <= _TOLERANCE[config.dtype]:
        raise ConfigError(
            f"{name} has something that the hf adapter leaves out: log-probs of a few tokens are {apart:.2g} from those of "
            "its plain forward; use vllm"
        )


def _generated(model: PreTrainedModel, max_model_len: int) -> list[Row]:
    batch = RunningBatch(model, 1)
    rows: list[Row] = []
    for length in _PROMPTS:
        prompt = tuple(
            7 * place % batch.vocab_size for place in range(max(1, min(length, max_model_len - _STEPS)))
        )
        sampling = SamplingParams(max_tokens=_STEPS, temperature=0.0)
        request = GenerateRequest(request_id="probe", prompt_ids=prompt, sampling=sampling)
        rows.append(new_row(request, (), max_model_len))
    batch.join(rows)
    for _ in range(min(row.limit for row in rows)):
        batch.step(0)
    return batch.leave(lambda _: True)


@torch.inference_mode()
def _gaps(model: PreTrainedModel, row: Row) -> list[float]:
    ids = torch.tensor([row.known_ids], device=model.device)
    logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    first = len(row.request.prompt_ids) - 1
    return [
        abs(float(logprobs[first + place, token]) - row.logprobs[place])
        for place, token in enumerate(row.token_ids)
    ]


class MergedLora:
    """Updates that bring A and B alone: W = base + alpha / rank * B @ A, computed in float32.

    Merged, it costs generation nothing, and in float32 the weights are those of a merged export bit for bit. The base
    weights under it are kept in host memory; every update starts from them, so errors do not add up.
    """

    def __init__(self, model: PreTrainedModel, lora: LoraConfig) -> None:
        """Lie over `model`, whose weights are the base.

        Raises:
            ConfigError: a target is no linear layer of the model.
        """
        self._layers = lora_layers(model, lora)
        self._rank = lora.rank
        self._scale = lora.alpha / lora.rank
        self._base = {
            name: layer.weight.detach().to("cpu", copy=True) for name, layer in self._layers.items()
        }

    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what an update must bring: A and B of every layer, under peft's names."""
        dtype = dtype_name(next(iter(self._base.values())))
        return lora_specs(self._layers, self._rank, dtype)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check all, then merge all; raises `UpdateRefused` before anything changes."""
        given = check_given(self.specs(), tensors)
        with torch.no_grad():
            for name, layer in self._layers.items():
                live = layer.weight
                a, b = (given[each].to(live.device).float() for each in names_of(name))
                merged = self._base[name].to(live.device).float() + self._scale * (b @ a)
                live.copy_(merged)


_IDLE_WAIT_S = 1.0  # an idle thread looks around this often; every command wakes it at once


class Worker:
    """Generates in a thread of its own and hands completions to `deliver` (called in that thread)."""

    def __init__(
        self,
        config: RolloutConfig,
        deliver: Callable[[list[Answer]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Prepare; `failed` is called once if generating dies, after which the thread is gone."""
        self.version = 0
        self.tokens_made = 0
        self.num_running = 0
        self.asleep = False
        self.vocab_size = 0
        self._config = config
        self._deliver = deliver
        self._failed = failed
        self._changed = threading.Condition()
        self._commands: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._stopping = False
        self._dead: str | None = None  # why the thread no longer takes commands
        self._paused = False
        self._drained: list[Future[None]] = []  # who waits for the running requests to end
        self._waiting: deque[Row] = deque()
        self._held: deque[Row] = deque()  # arrived after a pause that waits; they start at `resume`
        self._eos: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="offbeat-hf-generate", daemon=True)

    def start(self) -> Future[None]:
        """Start the thread; the result comes when the model is loaded."""
        self._thread.start()
        return self.call(self._load)

    def call(self, command: Callable[[], T], *, wake: bool = True) -> Future[T]:
        """Run `command` in the thread, between two tokens; if its future is cancelled before, it is not run.

        An idle thread looks for it at once, or without `wake` when `wake` is called.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # from here on nobody can cancel it, or setting its result would end the thread
            try:
                future.set_result(command())
            except BaseException as error:  # noqa: BLE001 - handed to whoever asked
                future.set_exception(error)

        with self._changed:
            if self._dead is not None:
                future.set_exception(EngineStateError(self._dead))
                return future
            self._commands.append((run, future))
            if wake:
                self._changed.notify()
        return future

    def wake(self) -> None:
        """Have an idle thread look for commands."""
        with self._changed:
            self._changed.notify()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the current token; True if it ended within `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def paused(self) -> bool:
        """Whether generation stands still until `resume`."""
        return self._paused

    def work(self) -> Work:
        """Return what is being done now; asked from any thread, in the middle of a token too."""
        rows = list(self._batch.rows)  # a copy in one step: the thread changes the list
        made = {row.request.request_id: len(row.token_ids) for row in rows}
        return Work(tokens_made=self.tokens_made, at_work=made, paused=self._paused)

    # Commands: run in the thread through `call`.

    def submit(self, requests: Sequence[tuple[GenerateRequest, asyncio.Future[Completion]]]) -> None:
        """Queue checked requests, each with who waits for it."""
        rows = [
            new_row(request, self._eos, self._config.max_model_len, self._stop_strings(request))
            for request, _ in requests
        ]
        for row, (_, future) in zip(rows, requests, strict=True):
            row.waits = future
        (self._held if self._drained else self._waiting).extend(rows)

    def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with what they have."""
        wanted = frozenset(request_ids)
        self._abort_where(lambda row: row.request.request_id in wanted)

    def pause(self, mode: PauseMode, holds: Future[None]) -> None:
        """Stop between two tokens; `holds` ends when the pause does hold. Cancelled before, a wait is called off."""
        if mode is PauseMode.WAIT and (self._batch.rows or self._waiting) and not self._paused:
            self._drained.append(holds)
            return
        if mode is PauseMode.ABORT:
            self._abort_where(lambda _: True)
        self._paused = True
        _end(holds)

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._end_wait(EngineStateError("resumed while a pause was still waiting for requests to end"))

    def specs(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return the weights' names, shapes and dtypes."""
        return self._weights.specs()

    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool
    ) -> None:
        """Check all, then change all, then serve them as `version`."""
        self._weights.load(tensors)
        self.version = version
        if recompute_kv:
            self._batch.recompute()

    def adopt_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, recompute_kv: bool
    ) -> bool:
        """As `load_weights`, from where the tensors lie; False, and nothing done, where the model must have its own."""
        weights = self._weights
        if self._config.device != "cpu" or not isinstance(weights, WholeWeights) or not weights.adopts:
            return False
        weights.adopt(tensors)
        self.version = version
        if recompute_kv:
            self._batch.recompute()
        return True

    def move_model(self, device: str, *, asleep: bool) -> None:
        """Move the weights; nothing may be running, keys and values are dropped."""
        if self._batch.rows or self._waiting:
            raise EngineStateError(
                f"{len(self._batch.rows) + len(self._waiting)} requests are running; `pause(ABORT)` before `sleep`"
            )
        self._model.to(device)  # pyright: ignore[reportArgumentType] # a device name is fine
        self._batch = RunningBatch(self._model, self._config.cpu_threads, self._recorder)
        self.asleep = asleep

    # The thread.

    def _stop_strings(self, request: GenerateRequest) -> StopStrings | None:
        stop = request.sampling.stop
        return StopStrings(self._tokenizer, request.prompt_ids, stop) if stop else None

    def _load(self) -> None:
        # Of the calling thread (OpenMP) and, where torch uses MKL, of the process: one engine per process.
        torch.set_num_threads(self._config.cpu_threads)
        self._eos = eos_token_ids(self._config.model_path)
        if self._config.stop_strings:
            self._tokenizer = load_tokenizer(
                self._config.model_path, trust_remote_code=self._config.trust_remote_code
            )
        self._model: PreTrainedModel = load_model(self._config)
        require_plain(self._model, self._config)
        lora = self._config.lora
        self._weights = MergedLora(self._model, lora) if lora.rank else WholeWeights(self._model)
        self._recorder = Recorder(self._model) if self._config.record_experts else None
        self._batch = RunningBatch(self._model, self._config.cpu_threads, self._recorder)
        self.vocab_size = self._batch.vocab_size

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._may_step():
                    self._advance()
        except BaseException as error:  # noqa: BLE001 - turned into every request's failure
            self._close(f"generation failed: {error!r}; start a new engine")
            self._failed(error)
        else:
            self._close("the engine was stopped; start a new one")

    def _take_commands(self) -> bool:
        """Run what was asked for; wait if there is nothing else to do. False at the end."""
        with self._changed:
            while not (self._commands or self._stopping or self._may_step()):
                self._changed.wait(_IDLE_WAIT_S)
            commands = list(self._commands)
            self._commands.clear()
        for command, _ in commands:
            command()
        self._see_whether_drained()  # by an abort, perhaps
        return not self._stopping

    def _may_step(self) -> bool:
        return not self._paused and (bool(self._waiting) or self.num_running > 0)

    def _advance(self) -> None:
        room = self._config.max_num_seqs - len(self._batch.rows)
        if self._waiting and room > 0:
            self._batch.join([self._waiting.popleft() for _ in range(min(room, len(self._waiting)))])
        self._batch.step(self.version)
        self.tokens_made += len(self._batch.rows)
        done = [(row.completion(finish), row.waits) for row, finish in self._batch.finished()]
        self.num_running = len(self._batch.rows)
        if done:
            self._deliver(done)
        self._see_whether_drained()

    def _see_whether_drained(self) -> None:
        if not self._drained:
            return
        if all(one.cancelled() for one in self._drained):
            self._end_wait()
        elif not self._batch.rows and not self._waiting:
            self._paused = True
            self._end_wait()

    def _end_wait(self, error: EngineStateError | None = None) -> None:
        """Tell those who wait for running requests to end; what came after them is next."""
        drained, self._drained = self._drained, []
        self._waiting.extend(self._held)
        self._held.clear()
        for one in drained:
            _end(one, error)

    def _abort_where(self, chosen: Callable[[Row], bool]) -> None:
        ended = self._batch.leave(chosen)
        self.num_running = len(self._batch.rows)
        for queue in (self._waiting, self._held):
            rows = list(queue)
            queue.clear()
            queue.extend(row for row in rows if not chosen(row))
            ended += [row for row in rows if chosen(row)]
        if ended:
            self._deliver([(row.completion(Finish.ABORT), row.waits) for row in ended])

    def _close(self, why: str) -> None:
        with self._changed:
            self._dead = why
            commands = list(self._commands)
            self._commands.clear()
            drained, self._drained = self._drained, []
        for future in (*(future for _, future in commands), *drained):
            _end(future, EngineStateError(why))


def _end(future: Future[Any], error: EngineStateError | None = None) -> None:
    if not future.set_running_or_notify_cancel():
        return  # who asked has gone
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
