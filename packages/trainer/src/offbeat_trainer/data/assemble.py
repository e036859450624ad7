"""Scored groups and supervised pairs become one `TrainBatch`.

N = prompts, G = trajectories of one prompt, B = rows (sequences), T = tokens of the longest sequence.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from offbeat_engine import Field, TrainBatch, register_field, train_batch
from offbeat_engine.batch import schema
from offbeat_rollout import Finish
from offbeat_trainer.data.metrics import Max, Mean, Metric, Sum
from offbeat_trainer.data.types import NO_VERSION, Limit, versions_of
from offbeat_trainer.errors import TrainerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from offbeat_trainer.data.types import Ending, Example, Group, Row, Score, Trajectory, Turn

Ids: TypeAlias = "npt.NDArray[np.int32] | npt.NDArray[np.int64]"
KEPT = register_field(
    Field(
        key="rollout/kept_ids",
        dims="BTK",
        dtype=torch.int64,
        meaning="tokens that truncated sampling kept, of which each was drawn; -1 fills up, and is all where nothing was cut",
    )
)


async def assembled(
    groups: Sequence[Group],
    targets_of: Callable[[Sequence[Group]], Mapping[str, torch.Tensor]],
    temperature: float,
) -> TrainBatch:
    """Return the batch of `groups`, for which `targets_of` says what is to be learned; see `assemble`.

    It is made in a thread: a large one takes seconds, in which requests are routed and answers read.
    """
    return await asyncio.to_thread(lambda: assemble(groups, targets_of(groups), temperature=temperature))


def assemble(
    groups: Sequence[Group], targets: Mapping[str, torch.Tensor], *, temperature: float
) -> TrainBatch:
    """Return one training batch on the CPU, a sequence for each row, in the order of `groups` and of their trajectories.

    Right-padded with 0. `loss_mask` covers the tokens that a policy sampled, those that ended a turn included, and leaves out
    what an environment said, and what a target `loss_mask` says. What was aborted trains the tokens it has; an empty trajectory stays in the batch (rows keep
    matching trajectories) and contributes no loss token. Targets are of trajectories, however many rows these have.

    Keys: input_ids, lengths, loss_mask, rollout_logprobs, policy_version (`NO_VERSION` outside the mask), temperature, group (index
    into `groups`), and those of `targets`, see `Algorithm.targets`; they are zero outside the mask. `KEPT`, where `top_logprobs` tell
    of any. Where it was recorded, `routed_experts`: -1 for what was routed nowhere, a sequence's last token, padding, an empty completion.

    Raises:
        TrainerError: no groups, an empty prompt, `temperature` <= 0, a target that is unknown, of another shape, or no
            finite number, experts that are not those of the sequence's tokens, or kept tokens of which some are not told.
    """
    if not groups:
        raise TrainerError("`assemble` needs at least one group, got none")
    if not temperature > 0:
        raise TrainerError(
            f"`temperature` must be > 0, got {temperature}; greedy completions have no policy gradient"
        )
    rows_of_each = [one.rows for group in groups for one in group.trajectories]
    rows = [row for own in rows_of_each for row in own]
    group_B = [index for index, group in enumerate(groups) for one in group.trajectories for _ in one.rows]
    prompts = [np.array(group.prompt.token_ids, np.int64) for group in groups]
    contexts = [row.context for row in rows]
    before = [prompts[i] if one is None else one for i, one in zip(group_B, contexts, strict=True)]
    frame, after_BT = _frame(before, [row.token_ids for row in rows])
    logprobs_BT, versions_BT = _sampled(rows, after_BT)
    _check_logprobs([groups[index].prompt.uid for index in group_B], logprobs_BT)
    frame["loss_mask"] = torch.from_numpy(versions_BT != NO_VERSION)
    places = (torch.from_numpy(after_BT), frame["loss_mask"])
    if len(rows) > len(rows_of_each):
        targets = {key: _by_row(key, target, rows_of_each) for key, target in targets.items()}
    if "loss_mask" in targets:
        frame["loss_mask"] &= _kept(targets["loss_mask"], *places)  # in place: `places` have it too
    versions_BT[~frame["loss_mask"].numpy()] = NO_VERSION
    return train_batch(
        **frame,
        **{key: _placed(key, target, *places) for key, target in targets.items() if key != "loss_mask"},
        rollout_logprobs=torch.from_numpy(logprobs_BT),
        policy_version=torch.from_numpy(versions_BT),
        temperature=torch.full((len(rows),), temperature, dtype=torch.float32),
        group=torch.tensor(group_B, dtype=torch.int64),
        **_routed_experts(rows, frame),
        **_kept_ids(rows, after_BT),
    )


def _sampled(
    rows: Sequence[Row], after_BT: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return log-probs and versions [B, T] of the tokens after the prompts; 0 and `NO_VERSION` elsewhere."""
    logprobs_BT = np.zeros(after_BT.shape, np.float32)
    versions_BT = np.full(after_BT.shape, NO_VERSION, np.int64)
    if rows:
        logprobs_BT[after_BT] = np.concatenate([row.logprobs for row in rows])
        versions_BT[after_BT] = versions_of(rows)
    return logprobs_BT, versions_BT


def _by_row(key: str, target: torch.Tensor, rows_of_each: Sequence[tuple[Row, ...]]) -> torch.Tensor:
    """Return a target of trajectories, [B] or one number per token after the prompt, as one of their rows."""
    num_tokens = [[row.num_tokens for row in rows] for rows in rows_of_each]
    longest = max(map(sum, num_tokens))
    if len(target) != len(num_tokens) or (target.ndim > 1 and target.shape[1] != longest):
        shape = f"[{len(num_tokens)}] or [{len(num_tokens)}, {longest}]"
        raise TrainerError(
            f"target `{key}` must be {shape}, of trajectories, whose rows it is cut into; got {list(target.shape)}"
        )
    if target.ndim == 1:
        return target.repeat_interleave(torch.tensor([len(counts) for counts in num_tokens]))
    parts: list[torch.Tensor] = []
    for own, counts in zip(target, num_tokens, strict=True):
        parts += torch.split(own[: sum(counts)], counts)
    return pad_sequence(parts, batch_first=True)


def _routed_experts(rows: Sequence[Row], frame: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the key `routed_experts` [B, T, L x K], layer after layer; nothing where no sampler recorded any."""
    recorded = [row.routed_experts for row in rows]
    shapes = {experts.shape[1:] for experts in recorded if experts is not None}
    if not shapes:
        return {}
    if len(shapes) > 1:
        raise TrainerError(
            f"completions of one step have experts of several shapes (layers, experts of a token): {sorted(shapes)}; "
            "let every replica serve one model"
        )
    layers, top_k = shapes.pop()
    experts_BTK = np.full((*frame["input_ids"].shape, layers * top_k), -1, np.int16)
    for row, experts in enumerate(recorded):
        length = int(frame["lengths"][row])
        if experts is None:
            continue
        if len(experts) >= length:
            raise TrainerError(
                f"row {row} of the batch has {length} tokens and experts of {len(experts)}: all but the last one were routed"
            )
        experts_BTK[row, : len(experts)] = experts.reshape(len(experts), -1)
    return {"routed_experts": torch.from_numpy(experts_BTK)}


def _kept_ids(rows: Sequence[Row], after_BT: npt.NDArray[np.bool_]) -> dict[str, torch.Tensor]:
    """Return the key `KEPT` [B, T, K], K the most that were kept anywhere; nothing where no sampler cut anything."""
    kept = [_kept_in(turn) for row in rows for turn in row.turns]
    most = max((ids_NK.shape[1] for ids_NK in kept), default=0)
    if not most:
        return {}
    kept_BTK = np.full((*after_BT.shape, most), -1, np.int64)
    kept_BTK[after_BT] = np.concatenate(
        [np.pad(ids_NK, ((0, 0), (0, most - ids_NK.shape[1])), constant_values=-1) for ids_NK in kept]
    )
    return {KEPT.key: torch.from_numpy(kept_BTK)}


def _kept_in(turn: Turn) -> npt.NDArray[np.int64]:
    """Return what was kept [N, K] for each of a turn's N tokens; K is 0 where nothing was cut, of which -inf would tell."""
    tops = turn.completion.top_logprobs
    cut_TK = np.zeros((0, 0), np.bool_) if tops is None else np.isneginf(tops.logprobs)
    if tops is None or not cut_TK.any():
        return np.full((turn.num_tokens, 0), -1, np.int64)
    if not cut_TK[:, -1].all():
        raise TrainerError(
            f"{turn.completion.request_id!r}: more tokens were kept than the {cut_TK.shape[1]} that `top_logprobs` told at "
            f"{int((~cut_TK[:, -1]).sum())} places; ask for more, so that one that was cut is among them at each"
        )
    ids_TK = np.where(cut_TK, -1, tops.token_ids)[:, : int((~cut_TK).sum(1).max())]
    return np.pad(ids_TK, ((len(turn.observed), 0), (0, 0)), constant_values=-1)


def _kept(target: torch.Tensor, after_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return which of the tokens under `mask_BT` the target `loss_mask` leaves in."""
    placed = _placed("loss_mask", target, after_BT, mask_BT)
    other = (target != 0) & (target != 1)
    if other.any():
        row = int(other.reshape(len(target), -1).any(1).nonzero()[0])
        raise TrainerError(
            "target `loss_mask` is 1 where a token is trained and 0 where it is left out; completion "
            f"{row} of the batch has {target[row][other[row]].flatten()[0].item():g}"
        )
    return placed


def _placed(key: str, target: torch.Tensor, after_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return a target as the batch holds it, in the dtype of `key`: at the trained tokens of those after the prompt."""
    known = {field.key: field for field in schema()}
    if key not in known:
        raise TrainerError(
            f"unknown target `{key}`; a batch may hold {', '.join(known)} (`offbeat_engine.register_field` adds one of your own)"
        )
    field, tokens_B = known[key], after_BT.sum(1)
    num_sequences, longest = len(tokens_B), int(tokens_B.max()) if len(tokens_B) else 0
    spread = field.dims == "BT" and target.ndim == 1
    per_token = field.dims != "B" and not spread
    fits = target.shape[:1] == (num_sequences,) and target.ndim == (1 if spread else len(field.dims))
    if not fits or (per_token and target.shape[1] != longest):
        wanted = (
            f"[{num_sequences}]"
            if field.dims == "B"
            else f"[{num_sequences}] or [{num_sequences}, {longest}]"
        )
        raise TrainerError(f"target `{key}` must be {wanted}, got {list(target.shape)}")
    target = target.to(field.dtype)
    if spread:
        target = torch.where(mask_BT, target[:, None], torch.zeros((), dtype=field.dtype))
    elif per_token:
        places_BC = torch.arange(target.shape[1]) < tokens_B[:, None]
        placed = torch.zeros((*mask_BT.shape, *target.shape[2:]), dtype=field.dtype)
        placed[after_BT] = target[places_BC]
        placed[~mask_BT] = 0
        target = placed
    if not target.isfinite().all():
        row = int((~target.isfinite()).reshape(num_sequences, -1).any(1).nonzero()[0])
        raise TrainerError(f"target `{key}` of completion {row} of the batch is no finite number")
    return target


def assemble_examples(examples: Sequence[Example]) -> TrainBatch:
    """Return a supervised batch: the completion is trained, the prompt is context; keys as the schema requires.

    Raises:
        TrainerError: no examples, or an empty prompt.
    """
    if not examples:
        raise TrainerError("`assemble_examples` needs at least one example, got none")
    frame, after_BT = _frame(
        [np.array(example.prompt_ids, np.int64) for example in examples],
        [np.array(example.completion_ids, np.int64) for example in examples],
    )
    trained = [example.trained or (True,) * len(example.completion_ids) for example in examples]
    frame["loss_mask"][torch.from_numpy(after_BT)] = torch.tensor([one for row in trained for one in row])
    return train_batch(**frame)


def group_metrics(groups: Sequence[Group]) -> list[Metric]:
    """Return what the scored `groups` say about the policy that made them, weighted to be joined with others.

    `completion/length_*` and `tokens/generated` count sampled tokens. `reward/std` is the mean over groups of the standard deviation inside one (over G), 0 where groups teach nothing.
    """
    trajectories = [one for group in groups for one in group.trajectories]
    scores = [score for group in groups for score in group.scores]
    lengths = [one.num_trained for one in trajectories]
    spreads = [_std([score.reward for score in group.scores]) for group in groups if group.scores]
    flat = sum(len({score.reward for score in group.scores}) == 1 for group in groups)
    num_trajectories = len(trajectories)

    def ended(finish: Ending) -> Mean:
        return Mean(sum(one.finish is finish for one in trajectories), num_trajectories)

    return [
        Metric("reward/mean", Mean(math.fsum(score.reward for score in scores), len(scores))),
        Metric("reward/std", Mean(math.fsum(spreads), len(spreads))),
        Metric("reward/max", Max(max((score.reward for score in scores), default=math.nan))),
        *(
            Metric(f"reward/{name}_mean", Mean(math.fsum(given), len(given)))
            for name, given in _parts(scores)
        ),
        *accuracy("accuracy/train", scores),
        Metric("completion/length_mean", Mean(sum(lengths), num_trajectories)),
        Metric("completion/length_max", Max(max(lengths, default=0))),
        Metric("completion/truncated_fraction", ended(Finish.LENGTH)),
        Metric("completion/aborted_fraction", ended(Finish.ABORT)),
        Metric("group/zero_variance_fraction", Mean(flat, len(spreads))),
        Metric("tokens/generated", Sum(sum(lengths))),
        *_turn_metrics(trajectories, ended),
    ]


def accuracy(name: str, scores: Sequence[Score]) -> list[Metric]:
    """Return the share of right trajectories; nothing where one of them is neither right nor wrong."""
    verdicts = [score.correct for score in scores if score.correct is not None]
    if not verdicts or len(verdicts) < len(scores):
        return []
    return [Metric(name, Mean(sum(verdicts), len(verdicts)))]


def _turn_metrics(trajectories: Sequence[Trajectory], ended: Callable[[Ending], Mean]) -> list[Metric]:
    """Return what there is to say where trajectories have turns and limits of their own; nothing where none has."""
    if all(one.is_plain for one in trajectories):
        return []
    turns = [len(one.turns) for one in trajectories]
    num_rows = sum(len(one.rows) for one in trajectories)
    observed = sum(one.num_tokens - one.num_trained for one in trajectories)
    return [
        Metric("trajectory/turns_mean", Mean(sum(turns), len(turns))),
        Metric("trajectory/turns_max", Max(max(turns, default=0))),
        Metric("trajectory/turns_extended", Sum(sum(turns) - num_rows)),
        Metric("trajectory/turns_forked", Sum(num_rows - len(turns))),
        Metric("trajectory/observed_tokens_mean", Mean(observed, len(turns))),
        *([Metric("trajectory/rows_mean", Mean(num_rows, len(turns)))] if num_rows > len(turns) else []),
        *(Metric(f"trajectory/out_of_{limit}_fraction", ended(limit)) for limit in Limit),
    ]


def staleness_metrics(groups: Sequence[Group], version: int) -> list[Metric]:
    """Return how old the tokens of `groups` are for a step that trains the weights of `version`.

    `staleness/<k>_fraction` is the histogram over tokens, k versions old; `trajectory/versions_*` count the versions
    that made one. What an environment said was made by none.
    """
    ages: Counter[int] = Counter()
    counts: list[int] = []
    for group in groups:
        for trajectory in group.trajectories:
            counts.append(len({span.version for span in trajectory.spans}))
            for made_by, start, end in trajectory.spans:
                ages[version - made_by] += end - start
    num_tokens = ages.total()
    return [
        Metric("staleness/mean", Mean(sum(age * count for age, count in ages.items()), num_tokens)),
        Metric("staleness/max", Max(max(ages, default=0))),
        *(Metric(f"staleness/{age}_fraction", Mean(ages[age], num_tokens)) for age in sorted(ages)),
        Metric("trajectory/versions_mean", Mean(sum(counts), len(counts))),
        Metric("trajectory/versions_max", Max(max(counts, default=0))),
    ]


def _parts(scores: Sequence[Score]) -> list[tuple[str, list[float]]]:
    """Return what each of several rewards gave, by its name."""
    given: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            given[name].append(value)
    return sorted(given.items())


def _check_logprobs(uids: Sequence[str], logprobs_BT: npt.NDArray[np.float32]) -> None:
    bad = np.flatnonzero(np.isnan(logprobs_BT).any(1))
    if len(bad):
        row = int(bad[0])
        raise TrainerError(
            f"the sampler gave NaN as a log-probability in a completion of prompt {uids[row]!r} (row {row} of the batch, "
            f"{len(bad)} of {len(uids)} completions); look at the replica's weights and dtype: the loss would be NaN too"
        )


def _frame(
    prompts: Sequence[Ids], completions: Sequence[Ids]
) -> tuple[dict[str, torch.Tensor], npt.NDArray[np.bool_]]:
    """Return input_ids, lengths and loss_mask of right-padded prompt + completion, and where the latter is [B, T]."""
    num_sequences = len(prompts)
    prompt_B = np.fromiter(map(len, prompts), np.int64, num_sequences)
    length_B = prompt_B + np.fromiter(map(len, completions), np.int64, num_sequences)
    if not prompt_B.all():
        raise TrainerError(
            f"sequence {int(prompt_B.argmin())} has an empty prompt; the first token of a sequence has no "
            "log-probability, so give every prompt at least one token (a start token, say)"
        )
    position_T = np.arange(int(length_B.max(initial=0)))
    is_prompt_BT = position_T < prompt_B[:, None]
    mask_BT = (position_T < length_B[:, None]) & ~is_prompt_BT
    ids_BT = np.zeros(mask_BT.shape, np.int64)
    if prompts:
        ids_BT[is_prompt_BT] = np.concatenate(prompts)
        ids_BT[mask_BT] = np.concatenate(completions)
    frame = {
        "input_ids": torch.from_numpy(ids_BT),
        "lengths": torch.from_numpy(length_B),
        "loss_mask": torch.from_numpy(mask_BT),
    }
    return frame, mask_BT


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
