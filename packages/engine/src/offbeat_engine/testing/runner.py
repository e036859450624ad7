"""What the cases of the conformance suite share: ranks, tiny models, references, and the base configuration."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from offbeat_engine.config import Feature, ModelConfig
from offbeat_engine.testing.compare import ValueLoss, WeightedLoss
from offbeat_engine.testing.models import FAMILIES, OPTIMIZER, make_tiny_model, scored_batch
from offbeat_engine.testing.probes import Job
from offbeat_engine.testing.ranks import RankPool
from offbeat_engine.testing.reference import Reference, Setup, reference_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from offbeat_engine.interface import Engine
    from offbeat_engine.testing.models import Variant

STEPS = 5
KEPT = (0, 1, STEPS)
BATCHES = [scored_batch(seed) for seed in range(STEPS)]
STALE = [scored_batch(100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """How far from the float32 reference an engine may be; relative ones are per tensor, in L2.

    `step_weight` is relative to how far a tensor moved since the start. `later_loss` holds for steps after the
    first, where the weights differ already; `bfloat16` is the factor by which the engine's error may exceed that
    of a plain bfloat16 model.
    """

    logprob: float = 1e-5
    loss: float = 1e-6
    later_loss: float = 1e-5
    gradient: float = 1e-4
    norm: float = 1e-5
    step_weight: float = 1e-3
    bfloat16: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run of the suite is about."""

    engine: type[Engine]
    families: tuple[str, ...] = tuple(FAMILIES)
    crossed: tuple[str, ...] = tuple(FAMILIES)
    num_ranks: int = 4
    device: str = "cpu"
    timeout_s: float = 600.0
    tolerances: Tolerances = field(default_factory=Tolerances)
    extra_variants: tuple[Variant, ...] = ()

    def fit(self, wanted: int) -> int:
        """Return how many ranks a case gets that would like `wanted` of them and can do with fewer."""
        most = self.engine.capabilities().max_ranks
        return max(1, min(wanted, self.num_ranks, wanted if most is None else most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to an engine. It needs `features` and `num_ranks`, and counts as exercise of those features.

    A `deep` one crosses a family with a feature, each of which other cases have.
    """

    name: str
    check: Callable[[Runner], None]
    features: frozenset[str] = frozenset()
    num_ranks: int = 1
    slow: bool = False
    deep: bool = False


class Ranks:
    """Pools of ranks by their number, started when first asked for, and anew after one `is_spent`."""

    def __init__(self, device: str = "cpu", timeout_s: float = 600.0) -> None:
        """Start nothing yet."""
        self._device = device
        self._timeout_s = timeout_s
        self._pools: dict[int, RankPool] = {}

    def pool(self, num_ranks: int) -> RankPool:
        """Return a pool of `num_ranks` that is not spent."""
        pool = self._pools.get(num_ranks)
        if pool is None or pool.is_spent:
            # One that failed may hang in a collective that will never end: it is stopped before the next starts.
            if pool is not None:
                pool.stop()
            pool = self._pools[num_ranks] = RankPool(num_ranks, self._timeout_s, device=self._device)
        return pool

    def close(self) -> None:
        """Stop all ranks."""
        for pool in self._pools.values():
            pool.release()  # all at once, so that they leave side by side
        for pool in self._pools.values():
            pool.stop()
        self._pools.clear()


class Runner:
    """Runs probes on ranks that are started once, and keeps models and references for the cases that share them."""

    def __init__(self, options: Options, ranks: Ranks | None = None) -> None:
        """Start nothing yet; given `ranks` are used and outlive the runner."""
        self.options = options
        self.features = options.engine.capabilities().features
        self.tolerances = options.tolerances
        self._stack = ExitStack()
        if ranks is None:
            ranks = self._stack.enter_context(closing(Ranks(options.device, options.timeout_s)))
        self._ranks = ranks
        self._references: dict[object, Reference] = {}
        self._folder: Path | None = None
        self._num_folders = 0

    def close(self) -> None:
        """Stop the ranks and remove the models."""
        self._folder = None
        self._stack.close()

    def folder(self) -> str:
        """Return the path of a new folder that does not exist yet."""
        self._num_folders += 1
        return str(self._root() / f"folder_{self._num_folders}")

    def _root(self) -> Path:
        if self._folder is None:
            self._folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="offbeat-conformance-")))
        return self._folder

    def model(self, family: str, head: str = "lm") -> str:
        """Return the folder of the tiny model of `family`, made on the first call."""
        path = self._root() / f"{family}-{head}"
        if not path.exists():
            chosen = FAMILIES[family]
            make_tiny_model(path, family=chosen.model_type, head=head, **chosen.settings)
        return str(path)

    def job(self, family: str, head: str = "lm", **changes: Any) -> Job:
        """Return the base configuration for `family`, changed, with the loss that fits the head.

        Raises:
            AssertionError: the engine declares a feature and its settings have no field to ask for it.
        """
        few = Feature.DYNAMIC_MICRO_BATCHES in self.features
        cls = self.options.engine.Config
        there = {item.name for item in fields(cls)}
        lacking = sorted(changes.keys() - there)
        if lacking:
            raise AssertionError(
                f"{self.options.engine.__name__} declares what this case needs, but {cls.__name__} has no field "
                f"{', '.join(lacking)} to ask for it"
            )
        if "packing" in there:
            changes = {"packing": Feature.PACKING in self.features, **changes}
        config = cls(
            model=ModelConfig(path=self.model(family, head), head="value" if head == "value" else "lm"),
            optimizer=OPTIMIZER,
            device="cuda" if self.options.device == "cuda" else "cpu",
            micro_batch_tokens=60 if few else 1 << 20,
            collective_timeout_s=self.options.timeout_s,
        )
        return Job(
            engine=self.options.engine,
            config=replace(config, **changes),
            loss_fn=ValueLoss() if head == "value" else WeightedLoss(),
        )

    def reference(self, job: Job, **changes: Any) -> Reference:
        """Return the plain run over `BATCHES` that `job` should come to; computed once for jobs that share it."""
        config = job.config
        setup = Setup(
            path=config.model.path,
            head=config.model.head,
            optimizer=config.optimizer,
            freeze=config.freeze,
            lora=config.lora if config.lora.rank else None,
        )
        setup = replace(setup, **changes)
        key = (replace(setup, adapter={}), job.loss_fn) if not setup.adapter else None
        if key is None:
            return reference_run(setup, BATCHES, job.loss_fn, KEPT)
        key = (repr(key),)
        if key not in self._references:
            self._references[key] = reference_run(setup, BATCHES, job.loss_fn, KEPT)
        return self._references[key]

    def run(self, probe: Callable[..., Any], num_ranks: int, job: Job, *args: object) -> list[Any]:
        """Run `probe(world, job, *args)` on `num_ranks` ranks; return its answers in rank order.

        Raises:
            AssertionError: the engine declares what the job asks for and refuses it all the same.
            RanksError: a rank raised, or did not answer within the deadline.
        """
        refused = job.engine.check(job.config, num_ranks)
        if refused:
            raise AssertionError(
                f"{job.engine.__name__} declares what this case needs, but `check` refuses it on {num_ranks} "
                f"rank(s): {'; '.join(map(str, refused))}"
            )
        return self._ranks.pool(num_ranks).run(probe, job, *args)
