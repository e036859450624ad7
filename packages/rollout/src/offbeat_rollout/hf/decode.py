"""The running batch of the Transformers adapter: prompts in, one token per row and step, finished rows out.

R = rows computed (a multiple of 16; those beyond the live ones are padding), P = tokens of a prompt, V = vocabulary.

All tokens but the last of a prompt are computed once into the cache ("prefill"); every logit then comes from the same
one-token step, so prompts and completions go one way and a prompt shared by many rows is computed once.

Sampling of one token per row, vectorised. R = rows, V = vocabulary.

Randomness is one uniform number per token, drawn from a stream that belongs to the request alone, and turned into a
token by inverting the cumulative distribution. So the token of a row depends on that row and its seed only.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed loosely.

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offbeat_rollout.hf.cache import POSITION_STEP, ROW_STEP, SlotCache, round_positions, round_up
from offbeat_rollout.types import Completion, Finish, TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt
    from transformers import PreTrainedModel

    from offbeat_rollout.hf.cache import Recorder
    from offbeat_rollout.toolkit.stop_strings import StopStrings
    from offbeat_rollout.types import GenerateRequest, SamplingParams


# Largest uniform drawn: one float32 step further and `u * total` could round up to `total`, beyond the last token.
_MAX_UNIFORM = 1.0 - 2.0**-23


def uniform_stream(seed: int | None, num_tokens: int) -> list[float]:
    """Return `num_tokens` uniforms in [0, 1) for a request; a longer stream of a seed begins with the shorter one.

    Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the
    seed, the counter the position. Without a seed the key is fresh entropy.
    """
    bits = np.random.Philox() if seed is None else np.random.Philox(key=seed % 2**128)
    return np.minimum(np.random.Generator(bits).random(num_tokens), _MAX_UNIFORM).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTable:
    """The sampling parameters of a batch as tensors; None where no row uses the feature."""

    temperature: torch.Tensor | None  # [R, 1] float32, 1 for greedy rows
    greedy: torch.Tensor | None  # [R] bool
    top_k: torch.Tensor | None  # [R, 1] int64, V where off
    top_p: torch.Tensor | None  # [R, 1] float32, 1 where off


def sampling_table(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingTable:
    """Return the table of `params`, one entry per row."""
    greedy = [p.temperature == 0 for p in params]
    temperature = [1.0 if p.temperature == 0 else p.temperature for p in params]
    top_k = [vocab_size if p.temperature == 0 or p.top_k == -1 else min(p.top_k, vocab_size) for p in params]
    top_p = [1.0 if p.temperature == 0 else p.top_p for p in params]

    def column(values: Sequence[float], off: float, dtype: torch.dtype) -> torch.Tensor | None:
        if all(value == off for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return SamplingTable(
        temperature=column(temperature, 1.0, torch.float32),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        top_k=column(top_k, vocab_size, torch.int64),
        top_p=column(top_p, 1.0, torch.float32),
    )


def truncate(
    logits_RV: torch.Tensor, top_k_R1: torch.Tensor | None, top_p_R1: torch.Tensor | None
) -> torch.Tensor:
    """Return logits with everything outside top-k, then outside the nucleus, at -inf; a row that asks for neither keeps its bits.

    Top-k keeps ties of the k-th value. Top-p keeps the smallest set of most likely tokens whose mass, after top-k,
    reaches p (Holtzman et al., "The curious case of neural text degeneration", ICLR 2020).
    """
    if top_k_R1 is None and top_p_R1 is None:
        return logits_RV
    sorted_RV, order_RV = logits_RV.sort(dim=-1, stable=True)  # ascending
    drop_RV = torch.zeros_like(sorted_RV, dtype=torch.bool)
    if top_k_R1 is not None:
        kth_R1 = sorted_RV.gather(1, sorted_RV.shape[1] - top_k_R1)
        drop_RV = sorted_RV < kth_R1
    if top_p_R1 is not None:
        mass_RV = sorted_RV.masked_fill(drop_RV, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
        outside_RV = (mass_RV <= 1 - top_p_R1) & (top_p_R1 < 1)
        outside_RV[:, -1] = False  # the most likely token always stays
        drop_RV = drop_RV | outside_RV
    return logits_RV.masked_fill(drop_RV.scatter(1, order_RV, drop_RV), -torch.inf)


def sample(
    logits_RV: torch.Tensor, table: SamplingTable, uniform_R: torch.Tensor, num_top: int = 0
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return (token ids [R] int64, log-probs [R] float32) drawn from float32 `logits_RV`, and the likeliest tokens.

    Those are (log-probs [R, K], token ids [R, K]), likeliest first, where K = `num_top` is not 0.

    Log-probs are those of the distribution drawn from, after temperature and truncation; greedy rows are given at
    temperature 1 without truncation.
    """
    if table.temperature is not None:
        logits_RV = logits_RV / table.temperature
    logits_RV = truncate(logits_RV, table.top_k, table.top_p)
    logprob_RV = logits_RV.log_softmax(dim=-1)
    cdf_RV = logprob_RV.exp().cumsum(dim=-1)
    target_R1 = uniform_R.unsqueeze(1) * cdf_RV[:, -1:]
    # right=True: the first entry above the target, so a token of probability zero is never drawn.
    token_R = torch.searchsorted(cdf_RV, target_R1, right=True).squeeze(1)
    if table.greedy is not None:
        token_R = torch.where(table.greedy, logits_RV.argmax(dim=-1), token_R)
    top = logprob_RV.topk(num_top, dim=-1) if num_top else None
    return token_R, logprob_RV.gather(1, token_R.unsqueeze(1)).squeeze(1), top


_STEPS_AHEAD = 8  # whose tokens are written into rows at once
_PREFILL_TOKENS = 16384  # in one call of the model; bounds the memory of a prefill


@dataclass(slots=True)
class Row:
    """One request on its way."""

    request: GenerateRequest
    stops: frozenset[int]
    limit: int  # tokens to make at most
    uniforms: list[float]
    waits: Any = None  # who waits for it
    stop_strings: StopStrings | None = None
    stopped_at: str | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    tops: list[tuple[list[float], list[int]]] = field(default_factory=list[tuple[list[float], list[int]]])
    experts: list[npt.NDArray[np.int16]] = field(
        default_factory=list["npt.NDArray[np.int16]"]
    )  # [tokens, L, K] each

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.request.prompt_ids, *self.token_ids)

    def completion(self, finish: Finish) -> Completion:
        """Return what there is."""
        made = Completion.of(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            policy_versions=self.versions,
            finish=finish,
            top_logprobs=self._top_logprobs(),
        )
        if self.experts and self.token_ids:
            made = replace(made, routed_experts=np.concatenate(self.experts))
        return made if self.stopped_at is None else replace(made, stop_reason=self.stopped_at)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Take the next tokens."""
        self.token_ids += tokens
        self.logprobs += logprobs
        self.versions += versions
        if self.stop_strings is not None:
            for token in tokens:
                self.stopped_at = self.stop_strings.add(token)

    @property
    def stopped(self) -> bool:
        """Whether the last token is one to stop at, or completes a text to stop at."""
        return self.stopped_at is not None or (bool(self.token_ids) and self.token_ids[-1] in self.stops)

    def _top_logprobs(self) -> TopLogprobs | None:
        num_top = self.request.sampling.top_logprobs
        if not num_top:
            return None
        values, ids = ([top[part] for top in self.tops] for part in (0, 1))
        shape = (len(self.tops), num_top)
        return TopLogprobs(
            token_ids=np.array(ids, np.int32).reshape(shape),
            logprobs=np.array(values, np.float32).reshape(shape),
        )


def new_row(
    request: GenerateRequest,
    eos: Collection[int],
    max_model_len: int,
    stop_strings: StopStrings | None = None,
) -> Row:
    """Return the row of a checked request; its length is bounded by the context too."""
    sampling = request.sampling
    limit = min(sampling.max_tokens, max_model_len - len(request.prompt_ids))
    greedy = sampling.temperature == 0
    return Row(
        request=request,
        stops=frozenset(sampling.stop_token_ids) | frozenset(eos),
        limit=limit,
        uniforms=[0.0] * limit if greedy else uniform_stream(sampling.seed, limit),
        stop_strings=stop_strings,
    )


class RunningBatch:
    """Rows that are being generated. Not thread-safe: the worker thread owns it."""

    def __init__(self, model: PreTrainedModel, num_threads: int, recorder: Recorder | None = None) -> None:
        """Start empty. Rows are padded to whole steps per thread, so that threads cut the batch at step borders.

        `recorder` listens to the model's routers.
        """
        self._recorder = recorder
        self.rows: list[Row] = []
        self._model = model
        self._device = torch.device(model.device)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._row_step = ROW_STEP * num_threads
        self._cache = SlotCache(int(model.config.get_text_config().num_hidden_layers))
        self._mask = torch.zeros(0, 1, 1, 0)  # [slots, 1, 1, positions], 0 where there is a token, else -inf
        self._table: SamplingTable | None = None
        self._token_R = torch.zeros(0, dtype=torch.int64)
        self._position_R = torch.zeros(0, dtype=torch.int64)
        self._max_length = 0
        # Steps whose tokens are not in the rows yet: token ids [R], log-probs [R], version.
        self._steps: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._uniform_RK = torch.zeros(0, 0)  # of the next K steps
        self._num_until_limit = 0  # steps from the first of `_steps` until a row reaches its limit
        self._stops: frozenset[int] = frozenset()  # of any row
        self._watches_text = False  # a row has texts to stop at

    @torch.inference_mode()
    def join(self, rows: Sequence[Row]) -> None:
        """Add rows; their prompts are computed now, each distinct one once."""
        self._write_rows()  # it knows who is where now
        first = len(self.rows)
        self.rows += rows
        self._reserve()
        self._prefill(rows, first)
        self._refresh()

    @torch.inference_mode()
    def leave(self, gone: Callable[[Row], bool]) -> list[Row]:
        """Take out the rows for which `gone` holds, whole, and close the gaps, so that the next step costs less."""
        self._write_rows()
        leaving = [slot for slot, row in enumerate(self.rows) if gone(row)]
        if not leaving:
            return []
        left = [self.rows[slot] for slot in leaving]
        remaining = len(self.rows) - len(leaving)
        leaving_set = set(leaving)
        source = [slot for slot in range(remaining, len(self.rows)) if slot not in leaving_set]
        target = [slot for slot in leaving if slot < remaining]
        for a, b in zip(source, target, strict=True):
            self.rows[b] = self.rows[a]
        del self.rows[remaining:]
        if source:
            self._cache.move(source, target)
        self._refresh()
        return left

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute keys and values of all live rows again, under the weights of now."""
        self._write_rows()
        if self.rows:
            self._cache.zero()
            self._prefill(self.rows, 0)

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Make one token in every row, with the weights called `version`."""
        live = len(self.rows)
        assert live, "a step needs rows"
        assert self._table is not None
        rows = len(self._position_R)
        if self._max_length >= self._cache.num_positions:
            self._reserve()
        if len(self._steps) == self._uniform_RK.shape[1]:
            self._look_ahead()
        mask = self._mask[:rows, :, :, : round_positions(self._max_length)]
        self._cache.begin_decode(self._position_R, mask.shape[-1])
        mask[self._cache.row_index, 0, 0, self._position_R] = 0
        logits = self._forward(self._token_R.unsqueeze(1), self._position_R.unsqueeze(1), mask)
        if self._recorder is not None:
            for row, experts in zip(self.rows, self._recorder.take(), strict=False):
                row.experts.append(experts[None])
        num_top = max(row.request.sampling.top_logprobs for row in self.rows)
        uniform_R = self._uniform_RK[:, len(self._steps)]
        token_R, logprob_R, top = sample(logits[:, -1].float(), self._table, uniform_R, num_top)
        self._steps.append((token_R, logprob_R, version))
        self._token_R = token_R
        self._position_R = self._position_R + 1
        self._position_R[live:] = 0
        self._max_length += 1
        if top is not None:
            for row, values, ids in zip(self.rows, top[0].tolist(), top[1].tolist(), strict=False):
                asked = row.request.sampling.top_logprobs
                row.tops.append((values[:asked], ids[:asked]))

    def finished(self) -> list[tuple[Row, Finish]]:
        """Take out the rows that ended where they were to stop or at their limit, with the reason."""
        if not self._may_have_finished():
            return []
        done = self.leave(lambda row: row.stopped or len(row.token_ids) >= row.limit)
        return [(row, Finish.STOP if row.stopped else Finish.LENGTH) for row in done]

    def _may_have_finished(self) -> bool:
        """Say whether the last step can have ended a row, by a look at all rows at once."""
        if not self._steps or self._watches_text or len(self._steps) >= self._num_until_limit:
            return True
        token_R = self._steps[-1][0]
        return bool(self._stops) and not self._stops.isdisjoint(token_R[: len(self.rows)].tolist())

    def _write_rows(self) -> None:
        """Write the tokens of the steps so far into the rows; what was drawn for later steps is drawn again."""
        if self._steps:
            tokens, logprobs, versions = zip(*self._steps, strict=True)
            self._steps.clear()
            made = zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
            for row, (own_tokens, own_logprobs) in zip(self.rows, made, strict=False):
                row.extend(own_tokens, own_logprobs, versions)
        self._uniform_RK = self._uniform_RK[:, :0]

    def _look_ahead(self) -> None:
        """Prepare the next few steps, in which no row reaches its limit before the last one."""
        self._write_rows()
        self._num_until_limit = min(row.limit - len(row.token_ids) for row in self.rows)
        ahead = max(1, min(_STEPS_AHEAD, self._num_until_limit))
        uniforms = [row.uniforms[len(row.token_ids) :][:ahead] for row in self.rows]
        uniforms += [[0.0] * ahead] * (len(self._position_R) - len(self.rows))
        self._uniform_RK = torch.tensor(uniforms, dtype=torch.float32, device=self._device)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits

    def _reserve(self) -> None:
        self._write_rows()
        slots = round_up(len(self.rows), self._row_step)
        longest = max(len(row.request.prompt_ids) + len(row.token_ids) for row in self.rows)
        if slots <= self._cache.num_slots and longest < self._cache.num_positions:
            return
        # Half as much again: few copies on the way, and no room for 4096 tokens where 40 are made.
        need = min(
            longest + longest // 2 + POSITION_STEP,
            max(len(r.request.prompt_ids) + r.limit for r in self.rows),
        )
        self._cache.reserve(slots, round_positions(max(need, longest + 1)))
        self._refresh()

    def _prefill(self, rows: Sequence[Row], first: int) -> None:
        """Fill the cache of `rows`, which sit in slots `first`, `first + 1`, ..., with all their tokens but the last."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, row in enumerate(rows, first):
            slots_of.setdefault(row.known_ids[:-1], []).append(slot)
        slots_of.pop((), None)
        # Equal padded lengths go together: the shapes a prompt is computed in follow from its own length alone.
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for ids in slots_of:
            by_length.setdefault(round_up(len(ids), ROW_STEP), []).append(ids)
        for length, prompts in by_length.items():
            per_call = max(1, _PREFILL_TOKENS // length)
            for start in range(0, len(prompts), per_call):
                self._prefill_call(prompts[start : start + per_call], length, slots_of)

    def _prefill_call(
        self, prompts: Sequence[tuple[int, ...]], length: int, slots_of: dict[tuple[int, ...], list[int]]
    ) -> None:
        ids = torch.tensor([[*p, *([0] * (length - len(p)))] for p in prompts], device=self._device)
        positions = torch.arange(length, device=self._device).expand(len(prompts), length)
        firsts = [slots_of[prompt][0] for prompt in prompts]
        self._cache.begin_prefill(torch.tensor(firsts, device=self._device))
        # A mask of four dimensions is passed on as it is; the attention of `SlotCache` is causal by itself here.
        self._forward(ids, positions, self._mask[:1, :, :, :1])
        self._record(prompts, length, slots_of)
        source = [slots_of[prompt][0] for prompt in prompts for _ in slots_of[prompt][1:]]
        target = [slot for prompt in prompts for slot in slots_of[prompt][1:]]
        if source:
            self._cache.move(source, target, length)

    def _record(
        self, prompts: Sequence[tuple[int, ...]], length: int, slots_of: dict[tuple[int, ...], list[int]]
    ) -> None:
        if self._recorder is None:
            return
        experts = self._recorder.take()
        each = experts.reshape(len(prompts), length, *experts.shape[1:])
        for prompt, experts in zip(prompts, each, strict=True):
            for slot in slots_of[prompt]:
                if not self.rows[
                    slot
                ].experts:  # else computed again, under weights that did not sample these
                    self.rows[slot].experts.append(experts[: len(prompt)])

    def _refresh(self) -> None:
        """Rebuild what depends on which rows there are."""
        rows = round_up(len(self.rows), self._row_step) if self.rows else 0
        padding = rows - len(self.rows)
        lengths = [len(row.request.prompt_ids) + len(row.token_ids) for row in self.rows]
        last = [row.token_ids[-1] if row.token_ids else row.request.prompt_ids[-1] for row in self.rows]
        self._token_R = torch.tensor(last + [0] * padding, device=self._device, dtype=torch.int64)
        self._position_R = torch.tensor(
            [n - 1 for n in lengths] + [0] * padding, device=self._device, dtype=torch.int64
        )
        self._max_length = max(lengths, default=0)
        reach_R1 = self._position_R.view(-1, 1)
        column = torch.arange(self._cache.num_positions, device=self._device)
        mask_RS = torch.zeros(rows, len(column), dtype=self._model.dtype, device=self._device)
        self._mask = mask_RS.masked_fill_(column > reach_R1, -torch.inf)[:, None, None, :]
        self._stops = frozenset[int]().union(*{row.stops for row in self.rows})
        self._watches_text = any(row.stop_strings is not None for row in self.rows)
        sampling = [row.request.sampling for row in self.rows]
        if sampling:
            padded = sampling + [sampling[0]] * padding
            self._table = sampling_table(padded, self.vocab_size, self._device)
