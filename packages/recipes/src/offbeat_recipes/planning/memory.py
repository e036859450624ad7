"""How much memory each process is expected to take: each line says what it counts.

What the libraries themselves take (Python, torch, vLLM: one to two GiB a process) comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offbeat_engine.config import Dtype, OptimizerName
from offbeat_recipes.planning.algorithm import algorithm_of, engines_of

if TYPE_CHECKING:
    from offbeat_engine import EngineConfig
    from offbeat_recipes.planning.facts import Facts, ModelFacts
    from offbeat_recipes.settings.tree import RunConfig

GIB = 1 << 30
MIB = 1 << 20
_FP32 = 4
_ADAPTED_WIDTHS = (
    20  # inputs and outputs of a layer's linear maps, in hidden sizes, of a model of Llama's shape
)
_SYNC_BUCKETS = 5  # being filled (two), digested, and on the wire (two), on a rank that sends
# Stored activations of one transformer layer, in bytes per token and hidden unit at two bytes a number; attention
# scores are recomputed by the fused kernels (Korthikanti et al. 2022, arXiv 2205.05198, equations 1 and 2).
_LAYER_BYTES = 34
_UNSHARED_LAYER_BYTES = (
    10  # of these, what ranks of a tensor hold each in full without `sequence_parallel` (ibid., section 4.1)
)
_CHECKPOINTED_LAYER_BYTES = 2


# SGLang loads from a file in memory, which is written from copies of tensors that lie in one buffer.
_FILE = "the file new weights are loaded from, and what it is written of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one process of a kind takes, item by item, in bytes; `num` processes of that kind run.

    `certain` of the items are arithmetic; the others depend on what is generated and are upper bounds.
    """

    process: str
    num: int
    items: tuple[tuple[str, int], ...]
    certain: int

    @property
    def total(self) -> int:
        """All items of one process."""
        return sum(num_bytes for _, num_bytes in self.items)


def rank_memory(config: RunConfig, facts: Facts, longest_tokens: int, sequences: int) -> Memory:
    """Return the memory of a training rank that holds `sequences` of at most `longest_tokens` a mini-batch."""
    model = facts.model
    assert model is not None
    ranks, params = config.engine.num_ranks, model.num_params
    width = bytes_of(config.model.dtype)
    engine = config.engine_config("")
    shard = _share(engine, model, ranks)
    states, trained = _states(engine, model, ranks)
    others, trained_too = _other_roles(config, facts)
    models = (model, *facts.role_models.values())
    # Beside the whole of one weight lies what its holder sends of it.
    gathered = max(
        one.num_params if engine.gathers_weights else 2 * one.vocab_size * one.hidden_size for one in models
    )
    loading = []
    if facts.loads_whole and config.device == "cpu":
        loading = [("the whole model while it is loaded, float32, besides", params * _FP32 - shard * _FP32)]
    tokens = _tokens_of_a_rank(engine, longest_tokens, sequences)
    return Memory(
        process="training rank",
        num=ranks,
        items=(
            *states,
            *trained,
            *others,
            *trained_too,
            (f"gathered weights, {config.model.dtype.value}, at most", gathered * width),
            (f"activations of {tokens} tokens, at most", _activations(config, model, tokens)),
            ("buckets of the weight sync", _SYNC_BUCKETS * config.sync_config().bucket_bytes),
            *loading,
        ),
        certain=sum(num_bytes for _, num_bytes in (*states, *others)),
    )


Items = tuple[tuple[str, int], ...]


def _other_roles(config: RunConfig, facts: Facts) -> tuple[Items, Items]:
    """Return, as `_states`, what a rank keeps of the algorithm's other models: those of folders of their own, or the policy's."""
    assert facts.model is not None
    certain: list[tuple[str, int]] = []
    about: list[tuple[str, int]] = []
    specs = algorithm_of(config).roles()
    for name, engine in engines_of(config, config.engine_config("")).items():
        if name == "policy" or engine is None:
            continue
        model = facts.role_models.get(name, facts.model)
        ranks = config.engine.num_ranks
        if specs[name].trained:
            states, trained = _states(engine, model, ranks)
            certain += [(f"{name}: {item}", num_bytes) for item, num_bytes in states]
            about += [(f"{name}: {item}", num_bytes) for item, num_bytes in trained]
        else:
            dtype = engine.dtype if engine.inference_only else Dtype.FLOAT32
            certain.append(
                (f"{name} weights, {dtype.value}, sharded", _share(engine, model, ranks) * bytes_of(dtype))
            )
    return tuple(certain), tuple(about)


def _share(engine: EngineConfig, model: ModelFacts, ranks: int) -> int:
    """Return how many parameters a rank of `ranks` holds, at most of experts and on average of the rest."""
    rest = -(-(model.num_params - model.num_expert_params) // engine.shard_ranks(ranks))
    among, experts = engine.expert_ranks(ranks), model.num_experts
    part = 1 / among
    eight_bits = engine.optimizer.name is OptimizerName.ADAMW_8BIT
    if experts % among and (eight_bits or model.hidden_size % among):
        part = (
            -(-experts // among) / experts
        )  # whole ones: FSDP cuts each only where its width comes out even
    return rest + math.ceil(model.num_expert_params * part)


def _states(engine: EngineConfig, model: ModelFacts, ranks: int) -> tuple[Items, Items]:
    """Return what a rank keeps of the weights it trains: what is arithmetic, and what depends on which are trained."""
    shard = _share(engine, model, ranks)
    mine = shard
    if engine.moment_ranks(ranks) != engine.shard_ranks(ranks):
        mine = min(shard, -(-model.num_params // engine.moment_ranks(ranks)))
    if engine.lora.rank:
        base, width = ("base weights, frozen, sharded", shard * bytes_of(engine.dtype)), 4 * _FP32
        adapter = engine.lora.rank * model.num_layers * _ADAPTED_WIDTHS * model.hidden_size * width
        return (base,), (("adapter with gradients and moments, about", adapter),)
    beside = engine.dtype is Dtype.BFLOAT16 and not engine.gathers_weights
    weights = (("master weights, float32, sharded", (mine if beside else shard) * _FP32),)
    if beside:
        computing = f"weights, {engine.dtype.value}, sharded"
        weights = ((computing, shard * bytes_of(engine.dtype)), *weights)
    match engine.optimizer.name:
        case OptimizerName.ADAMW:
            moments = (("Adam's two moments, float32, sharded", mine * 2 * _FP32),)
        case OptimizerName.ADAMW_8BIT:  # and a scale for each block of 256
            moments = (("Adam's two moments, eight bits, sharded", mine * 2 + mine * 2 * _FP32 // 256),)
        case OptimizerName.ADAFACTOR:  # refused by every engine
            moments = ()
    rest = (("gradients, float32, sharded", shard * _FP32), *moments)
    if engine.freeze:
        return weights, tuple((f"{name}, at most", num_bytes) for name, num_bytes in rest)
    return (*weights, *rest), ()


def replica_memory(config: RunConfig, model: ModelFacts, gpu_gib: float) -> Memory:
    """Return the memory of one replica (of one device of it, with tensor parallelism)."""
    width, devices = bytes_of(config.model.dtype), config.rollout.tensor_parallel_size
    weights = -(-model.num_params * width // devices)
    staged = model.num_params * width
    by_file = config.rollout.name == "sglang"
    if by_file:
        staged = -(-staged // devices)  # in the process that drives the server, once for all its devices
    if config.device == "cuda":
        # vLLM takes its fraction whole: weights, activations, and keys and values in what is left. SGLang's activations come on top.
        cache = max(0, int(config.rollout.gpu_memory_fraction * gpu_gib * GIB) - weights)
        unknown = "" if gpu_gib else " (not known here)"
        cache_item = (f"keys, values and activations, what is left of gpu_memory_fraction{unknown}", cache)
    else:
        cache = int(config.rollout.kv_cache_gib * GIB)
        cache_item = ("keys and values", cache)
    # The Transformers adapter merges: it starts from the base again at every update.
    merges = config.sends_adapter_alone and config.rollout.name == "hf" and config.device == "cpu"
    base = [("base weights under the adapter, at most", weights)] if merges else []
    file = (_FILE, 2 * staged)
    return Memory(
        process="replica",
        num=config.rollout.num_replicas * devices,
        items=(
            (f"weights, {config.model.dtype.value}", weights),
            cache_item,
            *base,
            *(
                ()
                if stages_in_host_memory(config, model, gpu_gib)
                else (("new weights, staged until verified", staged),)
            ),
            *([file] if by_file and config.device == "cpu" else []),
        ),
        certain=weights + cache,
    )


def stages_in_host_memory(config: RunConfig, model: ModelFacts, gpu_gib: float) -> bool:
    """Say whether new weights find no room on a replica's GPU beside what `rollout.gpu_memory_fraction` takes: `auto` sends them through the host's memory then."""
    if config.device == "cpu" or not gpu_gib or config.sync.transport != "auto":
        return False
    beside = (1 - config.rollout.gpu_memory_fraction) * gpu_gib * GIB
    return model.num_params * bytes_of(config.model.dtype) > beside


def staged_memory(config: RunConfig, facts: Facts) -> Memory | None:
    """Return what new weights take in the memory of a host whose GPUs have no room for them: once, for all replicas there."""
    if facts.model is None or not stages_in_host_memory(config, facts.model, facts.gpu_gib):
        return None
    whole = facts.model.num_params * bytes_of(config.model.dtype)
    return Memory(
        process="all replicas of a machine, in host memory",
        num=1,
        items=(("new weights, staged until verified", whole),),
        certain=0,
    )


def file_memory(config: RunConfig, facts: Facts) -> Memory | None:
    """Return what a replica on GPUs takes in host memory for the file that its new weights are loaded from, if it does so."""
    if facts.model is None or config.rollout.name != "sglang" or config.device == "cpu":
        return None
    whole = facts.model.num_params * bytes_of(config.model.dtype)
    return Memory(
        process="replica, in host memory",
        num=config.rollout.num_replicas,
        items=((_FILE, 2 * whole),),
        certain=0,
    )


def batch_bytes(tokens: int) -> int:
    """Return what a step's batch of `tokens`, padding included, takes on its way to the ranks; recorded experts come on top."""
    # input_ids and policy_version in eight bytes each, advantages and rollout_logprobs in four, the mask in one.
    return 25 * tokens


def host_memory(config: RunConfig, facts: Facts) -> Memory | None:
    """Return what ranks on GPUs need in host memory while they load, if that is more than a tensor at a time."""
    if facts.model is None or not facts.loads_whole or config.device == "cpu":
        return None
    whole = facts.model.num_params * _FP32
    return Memory(
        process="training rank, in host memory",
        num=config.engine.num_ranks,
        items=(("the whole model while it is loaded, float32", whole),),
        certain=whole,
    )


def driver_memory(config: RunConfig) -> Memory:
    """Return the memory of what a private Ray sets aside."""
    store = config.cluster.object_store_mib * MIB
    return Memory(process="object store", num=1, items=(("shared memory, at most", store),), certain=0)


def kv_bytes_per_token(config: RunConfig, model: ModelFacts) -> int:
    """Return the bytes that keys and values of one token take, over all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * bytes_of(config.model.dtype)


def bytes_of(dtype: Dtype) -> int:
    """Return the bytes of one number."""
    return 2 if dtype is Dtype.BFLOAT16 else 4


def _of_settings(engine: EngineConfig, *names: str) -> list[int]:
    """Return sizes that not every engine has: 1 where it has none."""
    return [int(getattr(engine, f"{name}_size", 1)) for name in names]


def _tokens_of_a_rank(engine: EngineConfig, longest_tokens: int, sequences: int) -> int:
    """Return how many tokens a rank has of a micro-batch, at most: its budget, or its part of a longer sequence."""
    context, sequence, tensor = _of_settings(
        engine, "context_parallel", "sequence_parallel", "tensor_parallel"
    )
    share = context * sequence * (tensor if getattr(engine, "sequence_parallel", False) else 1)
    return max(
        -(-longest_tokens // share), min(engine.micro_batch_tokens, -(-sequences * longest_tokens // share))
    )


def _activations(config: RunConfig, model: ModelFacts, tokens: int) -> int:
    engine, again = config.engine, 0
    per_layer = tokens * model.hidden_size * bytes_of(config.model.dtype) // 2
    # Settings that not every engine has; with "products" a layer keeps most of what it would.
    if engine.activation_checkpointing and getattr(engine, "checkpoint_keeps", "inputs") == "inputs":
        again = model.num_layers
    whole = model.num_layers - again + (again > 0)  # of those computed again, one at a time
    # A pipeline divides nothing: its first stage holds as many micro-batches as there are stages (ibid., section 4.2.3).
    stages, runs, tensor = _of_settings(engine, "pipeline_parallel", "virtual_pipeline", "tensor_parallel")
    if runs > 1:  # the first stage begins so many runs of layers before the first of them comes back
        per_layer = per_layer * (stages * runs + stages - 1) // (stages * runs)
    full = _LAYER_BYTES if getattr(engine, "sequence_parallel", False) else _UNSHARED_LAYER_BYTES
    layer = full + -(-(_LAYER_BYTES - full) // tensor)
    return per_layer * (_CHECKPOINTED_LAYER_BYTES * again + layer * whole)
