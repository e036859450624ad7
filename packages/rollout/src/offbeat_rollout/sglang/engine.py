"""`SglangEngine`: the generation interface over SGLang's HTTP server (run with 0.5.23 on CPU, never on a GPU).

What it promises beyond the interface:

- One server, in processes of its own and in an environment of its own, that end with the process that holds the engine.
- Log-probs are those of the distribution that was drawn from. SGLang leaves truncation out of them, and is asked for those among
  the tokens that `top_k` or `top_p` left. Both at once are refused: `missing` says why.
- Texts to stop at are looked for here, so the server makes a few tokens more than are wanted, which are dropped.
- Versions per token come from SGLang's own spans; the weights loaded at start are version 0.
- A request with a `seed` is drawn by a hash of the seed and the position (`SglangConfig.deterministic`; without it seeds are
  ignored, as SGLang does). With fp32 on CPU its tokens do not depend on what else is in the batch.
- `pause(KEEP)` keeps the keys and values of running requests and goes on with them; after an update with `recompute_kv` they are
  computed again (SGLang's `retract`). Where scheduling overlaps, as on GPUs by default, they are computed again after every pause:
  SGLang's other pause leaves a batch under way, whose tokens would be named by the next version.
- What a request finds in the prefix cache is salted with the number of updates. A request that has no token yet when an
  update ends begins anew.
- What would end the server is refused before it is sent: tokens outside the vocabulary, prompts beyond the context. New weights are
  brought by others (`weight_updates`); after an update that failed while the server loaded, the engine serves no more.
- `sleep` and `wake` release nothing.
- On GPUs the server is SGLang's own, started by SGLang's own launcher on the devices that this process sees; that was never run.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat_rollout.config import require_config
from offbeat_rollout.errors import ConfigError, EngineStateError, RequestError, UpdateRefused
from offbeat_rollout.interface import RolloutEngine, check_request, eos_token_ids
from offbeat_rollout.sglang.arguments import check_arguments, check_model, experts_of, model_settings
from offbeat_rollout.sglang.client import Client, Requests
from offbeat_rollout.sglang.config import SglangConfig
from offbeat_rollout.sglang.running import Running, request_body, truncates
from offbeat_rollout.sglang.server import Server, SglangUpdates
from offbeat_rollout.toolkit.clock import RequestClock
from offbeat_rollout.toolkit.stop_strings import StopStrings, load_tokenizer
from offbeat_rollout.types import Health, PauseMode, RolloutCapabilities, RolloutFeature

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Sequence

    from tokenizers import Tokenizer

    from offbeat_rollout.config import RolloutConfig
    from offbeat_rollout.types import Completion, GenerateRequest


class SglangEngine(RolloutEngine):
    """One SGLang server and the processes it starts."""

    Config = SglangConfig
    config: SglangConfig

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._server: Server | None = None
        self._open_client: Client | None = None
        self._asleep: set[str] = set()
        self._updates = SglangUpdates(self.config, self._running, self._resting)
        self._requests = Requests(self._client, self._body)
        self._version = 0
        self._num_flips = 0
        self._vocab_size = 0
        self._eos: tuple[int, ...] = ()
        self._tokenizer: Tokenizer | None = None
        self._routed: tuple[int, int] | None = None
        self._clock = RequestClock(config.request_timeout_s, self._requests.work)

    @classmethod
    def capabilities(cls) -> RolloutCapabilities:
        """Say what this adapter does."""
        return RolloutCapabilities(
            adapter="sglang",
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float32", "bfloat16"}),
            features=frozenset(
                {
                    RolloutFeature.SEED,
                    RolloutFeature.PAUSE,
                    RolloutFeature.ABORT,
                    RolloutFeature.TOP_LOGPROBS,
                    RolloutFeature.RECOMPUTE_KV,
                    RolloutFeature.CONTINUOUS_BATCHING,
                    RolloutFeature.PREFIX_CACHING,
                    RolloutFeature.STOP_STRINGS,
                    RolloutFeature.ROUTED_EXPERTS,
                    RolloutFeature.TENSOR_PARALLEL,
                }
            ),
            missing={
                "lora": "it is sent whole weights; use engine.lora.export=merged, or vllm",
                "top_k_and_top_p": "SGLang takes `top_p` of all tokens, other adapters of the `top_k` likeliest, and beside a logit "
                "processor that cuts those first it does not say what was left to draw from; give one of them",
                "sleep_2": "a server that sleeps keeps its memory: SGLang's memory saver, which GPUs alone have, was never run here",
                "peer_copy": "weights are served in the form of SGLang's kernels (fused), from which the checkpoint's tensors "
                "do not come back: a replacement is sent them by the trainer",
            },
        )

    @classmethod
    def check(cls, config: RolloutConfig) -> None:
        """Refuse what SGLang cannot honour, `server_args` included; see `arguments`."""
        super().check(config)
        own = require_config(config, SglangConfig)
        check_arguments(own)
        if (Path(config.model_path) / "config.json").is_file():  # else not made yet; `start` looks again
            check_model(own)

    @property
    def version(self) -> int:
        """Version of the weights being served."""
        return self._version

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        if self._server is not None:
            raise EngineStateError("the engine is running already; `stop` it before another `start`")
        self.check(self.config)
        check_model(self.config)
        self._eos = eos_token_ids(self.config.model_path)
        self._vocab_size = int(model_settings(self.config.model_path)["vocab_size"])
        self._routed = experts_of(self.config)
        if self.config.stop_strings:
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, self.config.model_path, trust_remote_code=self.config.trust_remote_code
            )
        self._version, self._num_flips, self._requests.failure = 0, 0, ""
        timeout_s = self.config.start_timeout_s
        self._server = server = await asyncio.to_thread(Server, self.config)
        self._open_client = client = Client(server.url, server.key, self.config.request_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await server.ready(client)
        except BaseException as error:  # also cancelled: nobody would end what has begun
            await self.stop()
            if isinstance(error, TimeoutError):
                raise EngineStateError(
                    f"SGLang was not ready within {timeout_s} s (`start_timeout_s`); its processes were ended"
                ) from None
            raise

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request."""
        self._client()
        self._check(request)
        stop, tokenizer = request.sampling.stop, self._tokenizer
        running = Running(
            request,
            truncated=truncates(request, self._vocab_size),
            watch=StopStrings(tokenizer, request.prompt_ids, stop)
            if stop and tokenizer is not None
            else None,
            routed=self._routed,
        )
        async with self._clock.over([request.request_id]):
            await self._requests.run(running)
        return running.completion(self._version)

    async def generate_many(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Return the completions of `requests`, in their order; all are checked before any is started."""
        self._client()
        names = [request.request_id for request in requests]
        for request in requests:
            self._check(request)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise RequestError(f"request id {twice!r} came twice; ids must be unique while they run")
        return await super().generate_many(requests, ended)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests after the current step."""
        self._client()
        await self._requests.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling, and return when no more tokens are made; see the module for keys and values."""
        client, requests = self._client(), self._requests
        requests.open.clear()
        if requests.server_rests:
            if mode is PauseMode.ABORT:
                await requests.abort(list(requests.under_way))
            return
        try:
            match mode:
                case PauseMode.KEEP:
                    pass
                case PauseMode.ABORT:
                    await requests.abort([name for name, one in requests.under_way.items() if one.rid])
                case PauseMode.WAIT:
                    await requests.drain()
            await self._rest(client)
        except BaseException:
            await self.resume()  # nobody would
            raise

    async def resume(self) -> None:
        """Schedule again."""
        client = self._client()
        try:
            if self._requests.server_rests:
                await client.post("/continue_generation", {"torch_empty_cache": False})
                self._requests.server_rests = False
        finally:
            self._requests.open.set()  # else no deadline would count

    async def sleep(self, level: int) -> None:
        """End what is running and rest; no memory is given back."""
        if level != 1:
            raise ConfigError(
                f"sglang sleeps at level 1 only, got {level}: {self.capabilities().missing['sleep_2']}"
            )
        await self.pause(PauseMode.ABORT)
        self._asleep = {"weights", "kv_cache"}

    async def wake(self, tags: Collection[str] | None = None) -> None:
        """Go on once everything is back."""
        self._asleep -= self._asleep if tags is None else set(tags)
        if not self._asleep:
            await self.resume()

    def weight_updates(self) -> SglangUpdates:
        """Return what whoever brings weights must know of the server."""
        return self._updates

    async def health(self) -> Health:
        """Say whether the server's processes are there; nothing is asked of them, which may be loading, or rest."""
        why = self._gone()
        work = self._requests.work()
        return Health(
            ok=not why,
            version=self._version,
            num_running=len(self._requests.under_way),
            detail=why,
            tokens_made=work.tokens_made,
            paused=work.paused,
        )

    async def stop(self) -> None:
        """End the server and see that its processes are gone."""
        server, self._server = self._server, None
        client, self._open_client = self._open_client, None
        if server is not None:
            await asyncio.to_thread(server.end)
        if client is not None:
            await self._requests.leave()
            await client.close()
        self._requests.server_rests = False
        self._requests.open.set()  # who waits learns that there is no server

    def _gone(self) -> str:
        if self._server is None:
            return "not started"
        if self._server.ended:
            return "the server ended; its log says why"
        return self._requests.failure

    def _client(self) -> Client:
        if self._open_client is None:
            raise EngineStateError("the engine is not running; call `start` first")
        why = self._gone()
        if why:
            raise EngineStateError(f"{why}. `stop` the engine and start another")
        return self._open_client

    def _running(self) -> Server:
        self._client()
        assert self._server is not None
        return self._server

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self.config, self._vocab_size, self._requests.under_way)
        sampling = request.sampling
        if sampling.top_p < 1 and sampling.top_k != -1 and sampling.temperature > 0:
            raise RequestError(
                f"request {request.request_id!r}: `top_k` is {sampling.top_k} and `top_p` {sampling.top_p}: "
                f"{self.capabilities().missing['top_k_and_top_p']}"
            )

    def _body(self, running: Running, rid: str) -> dict[str, object]:
        """Return what is sent of a request now, as late as can be: its salt is that of the weights it begins under."""
        request = running.request
        room = self.config.max_model_len - len(request.prompt_ids)
        body: dict[str, Any] = request_body(
            request,
            rid,
            num_tokens=min(request.sampling.max_tokens, room),
            eos=self._eos,
            vocab_size=self._vocab_size,
        )
        if self.config.deterministic:
            # A request without one would be given the same one as all others.
            seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed % 2**63
            body["sampling_params"]["sampling_seed"] = seed
        return {**body, **running.asked, "cache_salt": f"update {self._num_flips}"}

    async def _rest(self, client: Client, recompute_kv: bool = False) -> None:
        """Have the server stop making tokens, and wait until it has: it only notes the wish when it is asked."""
        in_turn = self.config.server_args.get("disable_overlap_schedule", self.config.device == "cpu")
        mode = "in_place" if in_turn and not recompute_kv else "retract"
        self._requests.server_rests = True  # also where the answer is lost
        await client.post("/pause_generation", {"mode": mode})
        await client.post("/weights_checker", {"action": "checksum", "skip_tensor_list": [""]})  # of none

    @asynccontextmanager
    async def _resting(self, version: int, recompute_kv: bool) -> AsyncGenerator[None]:
        """Within it the server rests; then it serves `version`, or nothing any more."""
        client, requests = self._client(), self._requests
        was_open = requests.open.is_set()
        requests.open.clear()
        try:
            if recompute_kv or not requests.server_rests:
                await self._rest(client, recompute_kv)
        except BaseException as error:
            if was_open:
                await self.resume()  # nothing was loaded
            if isinstance(error, EngineStateError):
                raise UpdateRefused(
                    f"the server did not come to rest for version {version}: {error}"
                ) from error
            raise
        try:
            yield
        except BaseException as error:
            requests.fail(f"an update to version {version} failed while SGLang loaded it: {error}")
            raise
        before, self._version = self._version, version
        self._num_flips += 1
        requests.flipped(before)
        if was_open:
            await self.resume()
