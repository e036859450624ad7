"""Values for the weights of one rank: it reads its own blocks from the safetensors, and nothing else; or draws them."""

# megatron-core and transformers' configs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat_engine.errors import ConfigError
from offbeat_engine.megatron import families
from offbeat_engine.megatron.families import Block, Cut, blocks_of, parts_of
from offbeat_engine.toolkit.hf.weight_files import WeightFiles
from offbeat_engine.toolkit.state.slices import Region

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from offbeat_engine.config import ModelConfig
    from offbeat_engine.megatron.families import Entry, Shape
    from offbeat_engine.megatron.groups import Groups
    from offbeat_engine.megatron.layers.model import Chunk
    from offbeat_engine.megatron.updater import Share, Updater
    from offbeat_engine.toolkit.hf.weight_files import Read


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<of>.+)$")
_GROUPED = re.compile(r"^mlp\.experts\.(?P<of>linear_fc[12]\.weight)(?P<number>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter of this rank and its blocks; `of` is what it is in `families.entries`.

    `alone`: of the ranks that hold them in one copy of the model it is the one they leave from; `speaks`: of all copies, too.
    """

    param: torch.nn.Parameter
    of: tuple[Entry, int | None, int | None]
    blocks: tuple[Block, ...]
    alone: bool
    speaks: bool


def held_by(chunks: Sequence[Chunk], shape: Shape, groups: Groups, head: str) -> list[Held]:
    """Return all parameters of this rank's chunks."""
    single = {entry.ours: entry for entry in (families.EMBEDDING, families.FINAL_NORM, *families.VALUE_HEAD)}
    if head == "lm":
        single[families.HEAD.ours] = families.TIED_HEAD if shape.tied else families.HEAD
    of_layer = {entry.ours: entry for entry in shape.family.layer}
    found: list[Held] = []
    for chunk in chunks:
        for name, param in chunk.model.named_parameters():
            in_layer = _LAYER.match(name)
            if in_layer is None:
                found.append(_held(param, single[name], None, None, shape, groups))
                continue
            # As the layer itself says: with a pipeline of several runs a rank's layers are no neighbours.
            layer = int(chunk.model.decoder.layers[int(in_layer[1])].layer_number) - 1
            template, expert = _of_expert(in_layer[2], shape, groups)
            found.append(_held(param, of_layer[template], layer, expert, shape, groups))
    return found


def _of_expert(name: str, shape: Shape, groups: Groups) -> tuple[str, int | None]:
    """Return the name as the tables have it, and the number of the expert among all."""
    match = _EXPERT.match(name) or _GROUPED.match(name)
    if match is None:
        return name, None
    share = shape.num_experts // groups.expert.size
    expert = groups.expert.rank * share + int(match["number"])
    return f"mlp.experts.local_experts.{{expert}}.{match['of']}", expert


def _held(
    param: torch.nn.Parameter,
    entry: Entry,
    layer: int | None,
    expert: int | None,
    shape: Shape,
    groups: Groups,
) -> Held:
    # megatron-core says so only of weights that it fills itself, and without it counts the norm of one rank's part alone.
    setattr(param, "tensor_model_parallel", entry.cut is not Cut.COPY)  # noqa: B010 a name of megatron-core's
    first = groups.speaks_for_copies if expert is None else groups.speaks_for_experts
    # The last stage's copy of a tied embedding is the first stage's to speak for.
    alone = (entry.cut is not Cut.COPY or groups.tensor.rank == 0) and entry is not families.TIED_HEAD
    return Held(
        param=param,
        of=(entry, layer, expert),
        blocks=tuple(blocks_of(entry, layer, expert, shape, groups.tensor)),
        alone=alone,
        speaks=first and alone,
    )


_MAX_NAMED = 5
# What older transformers wrote and nobody reads.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def hf_config(model: ModelConfig) -> Any:  # noqa: ANN401
    """Return the config of a model's folder.

    Raises:
        ConfigError: transformers makes none of it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model.path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise ConfigError(f"no model in {model.path!r}: expected a Hugging Face folder ({said})") from error


@dataclass(frozen=True, slots=True)
class DrawnWeights:
    """Stands for a folder's `WeightFiles`: normal with deviation `spread`, but ones for norms and zeros for biases.

    So the families that this engine knows begin in transformers, too, from other numbers. They follow from `seed` and each weight's name, so
    that every layout of ranks draws the same. A weight is drawn whole by each rank that reads of it.
    """

    shapes: dict[str, tuple[int, ...]]
    seed: int
    spread: float

    @contextmanager
    def opened(self, names: Iterable[str]) -> Generator[Read]:
        """Give a function as `WeightFiles.opened` does; what it has drawn it keeps until the end."""
        drawn = {name: self._draw(name) for name in names}

        def read(
            name: str, start: int = 0, stop: int | None = None, columns: slice | None = None
        ) -> torch.Tensor:
            return drawn[name][start:stop] if columns is None else drawn[name][start:stop, columns]

        yield read

    def _draw(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        draw = torch.Generator().manual_seed(self.seed + (zlib.crc32(name.encode()) << 20))
        return torch.empty(shape).normal_(0.0, self.spread, generator=draw)


Source = WeightFiles | DrawnWeights


def source_of(model: ModelConfig, shape: Shape, spread: float) -> Source:
    """Return where weights come from: the folder's files, or a drawing with deviation `spread`.

    Raises:
        ConfigError: as `check_files`.
    """
    if not model.random_init:
        return check_files(model, shape)
    wanted = families.all_in_files(shape, model.head).items()
    return DrawnWeights({name: whole for name, whole in wanted if not is_drawn(name)}, model.seed, spread)


def check_files(model: ModelConfig, shape: Shape) -> WeightFiles:
    """Hold what the headers of a folder's safetensors say against the family's table; reads no weights.

    Raises:
        ConfigError: a file is damaged, or a weight is missing, one too many, or of another shape.
    """
    try:
        files = WeightFiles.find(Path(model.path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the weights in {model.path!r} cannot be used: {error}") from error
    if files is None:
        raise ConfigError(f"no safetensors in {model.path!r}; this engine reads no other weights")
    wanted = families.all_in_files(shape, model.head)
    lacking = [name for name in wanted if name not in files.shapes and not is_drawn(name)]
    known = {"lm_head.weight"} if shape.tied or model.head == "value" else set[str]()
    extra = [name for name in files.shapes if not (name in wanted or name in known or _IGNORED.search(name))]
    odd = [name for name, whole in wanted.items() if files.shapes.get(name, whole) != whole]
    for names, what in (
        (lacking, "lack"),
        (extra, "hold more than the family has:"),
        (odd, "have other shapes than config.json says:"),
    ):
        if names:
            some = ", ".join(f"`{name}`" for name in names[:_MAX_NAMED])
            raise ConfigError(
                f"the weights in {model.path!r} {what} {len(names)} weights, such as {some}; is config.json of another model?"
            )
    return files


def is_drawn(name: str) -> bool:
    """Return whether a folder need not hold this weight: a value head is usually begun from a language model."""
    return name.startswith("score.")


def fill(
    held: Sequence[Held], files: Source, model: ModelConfig, spread: float, updater: Updater | None
) -> None:
    """Read this rank's blocks into its parameters, and into master weights that are apart from them.

    A value head that no file holds is drawn from the seed.

    Raises:
        OSError: a file cannot be read.
    """
    with torch.no_grad():
        for one in held:
            share = None if updater is None else updater.share(one.param)
            master = share if share is not None and share.is_apart else None
            named = {block.name for block in one.blocks}
            if not named <= files.shapes.keys():
                values = drawn(tuple(one.param.shape), model.seed, spread)
                one.param.copy_(values)
                if master is not None:
                    master.master.copy_(values.view(-1)[master.start : master.stop].view(master.master.shape))
                continue
            if one.param.dim():
                one.param.zero_()  # rows that fill up the vocabulary
            if master is not None:
                master.master.zero_()
            with files.opened(named) as read:
                for name, region, place in _places(one, master):
                    rows, *columns = region.within(Region.whole(files.shapes[name]))
                    place.copy_(read(name, rows.start, rows.stop, *columns))


def _places(one: Held, master: Share | None) -> Iterator[tuple[str, Region, torch.Tensor]]:
    """Yield what to read: a name, which part of it, and where that goes."""
    for block in one.blocks:
        yield block.name, Region(block.offsets, block.sizes), block.of(one.param)
    if master is not None:
        run = master.master.view(-1)
        for part in parts_of(one.blocks, tuple(one.param.shape), master.start, master.stop):
            yield part.block.name, part.region, part.of(run)


def drawn(shape: tuple[int, ...], seed: int, spread: float) -> torch.Tensor:
    """Return a value head's weight as every rank draws it; its bias is zero."""
    draw = torch.Generator().manual_seed(seed)
    whole = torch.zeros(shape)
    if whole.dim() > 1:
        whole.normal_(0.0, spread, generator=draw)
    return whole
