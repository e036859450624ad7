"""What `Trainer` takes. Written by `tools/make_typed_settings.py` from the fields of the settings; change those, not this file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Required, TypeAlias, TypedDict, TypeVar, Unpack

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Text: TypeAlias = str | Path
Reward: TypeAlias = Callable[..., object] | str

class Task(Protocol):
    """A task that is made already."""

    def prompts(self, *args: Any, **kwargs: Any) -> Any: ...

class OwnSettings(TypedDict, total=False, extra_items=Any):
    """A section for a plug-in that is named, say by the path of a class: what it is set to is its own."""

    name: Required[str]

class ModeSettings(TypedDict, total=False):
    name: Literal['sync'] | Literal['one_step_off'] | Literal['fully_async']
    """how generation and training take turns; by default sync"""
    over_sampling: float
    """share of groups begun beyond those a step takes; by default 0.0"""
    max_staleness: int
    """versions that a trained token may be old, at most; by default 2"""
    sync_every: int
    """Weights go to the replicas every `sync_every` steps; by default 1"""
    partial: Literal['keep', 'recompute', 'abort', 'wait']
    """What happens to completions that are under way when new weights come; by default keep"""
    order: Literal['first_in', 'oldest_version', 'longest_waiting']
    """Which finished groups a step takes first, where the staleness bound leaves a choice; by default oldest_version"""

class TaskSettings(TypedDict, total=False):
    name: Literal['arithmetic', 'calculator', 'code', 'countdown', 'file', 'gsm8k', 'pairs', 'sql', 'word_game']
    """an installed task, or the path of a class (`reverse.py:Reverse`): where prompts and rewards come from; by default arithmetic"""
    held_out_fraction: float
    """share of prompts kept for validation; by default 0.1"""
    hidden_size: int
    """`hidden_size` 0: 32 for each head, which all adapters compute with; by default 0"""
    num_layers: int
    """layers of the tiny model; by default 2"""
    num_heads: int
    """`num_heads` 0: three, or the next number that the ranks sharing a layer can share out (`engine.tensor_parallel_size`, `engine.sequence_parallel_size`, `rollout.tensor_parallel_size`); the console says so; by default 0"""
    intermediate_size: int
    """width of the tiny model's feed-forward part; by default 256"""
    careless: float
    """share of the warm-up's examples of a careless hand; by default 0.7"""
    level: int
    """`level` is the number of digits of both operands; by default 2"""
    carry_share: float
    """Each column but the last carries with probability `carry_share`; by default 0.7"""
    steps: int
    """of a function; by default 3"""
    count: int
    """numbers of a problem; by default 3"""
    used: int
    """of these by the expression that the target comes from; by default 2"""
    largest: int
    """the largest of them; by default 9"""
    max_prompt_tokens: int
    """most tokens of a prompt; by default 256"""
    chat_template: Literal['auto', 'always', 'never']
    """`chat_template` "auto" applies the tokenizer's template, if it has one, to lists of messages, and to plain text as the user's message, but for text that holds special tokens of the tokenizer, a template's work already; "always" applies it to all text, "never" to none; by default auto"""
    train_path: Text | list[str] | tuple[str, ...]
    """file of the prompts to train on, or several; by default ''"""
    validation_path: Text | list[str] | tuple[str, ...]
    """file of the prompts to validate on, or several; by default ''"""
    columns: Mapping[str, Text]
    """What columns are called in the files, by their names here: task.columns.prompt=question; by default {}"""
    filter: Text
    """Function of a row that says whether it is taken, package.module:function or file.py:function; by default ''"""
    overlong: Literal['refuse', 'filter']
    """What follows a prompt of more than max_prompt_tokens: it is refused with its row, or left out and counted; by default refuse"""
    reward: Text | list[str] | tuple[str, ...]
    """`reward` names one function or several, "package.module:function" or "folder/file.py:function" (docs/rewards.md), or a class that scores groups (docs/plug-ins.md); of functions it is their sum; by default ''"""
    reward_weights: list[float] | tuple[float, ...]
    """what each function is multiplied by; 1 if empty; by default []"""
    correct_at: float | None
    """reward from which on a completion is right; null: 1 is, and 0 is wrong; by default null"""
    answer: Literal['strict', 'flexible']
    """Grade-school word problems in the public format: `question`, and `answer` that ends in `#### 42`. `answer` "strict" takes the number after `####`, "flexible" the last number of the completion; by default strict"""
    rows: int
    """of the table; by default 8"""
    letters: int
    """letters that the word may have; by default 4"""
    length: int
    """of the word; by default 3"""
    guesses: int
    """after which the game is lost; by default 5"""

class ModelSettings(TypedDict, total=False):
    path: Text
    """An empty `path` means that the task makes one. `path` is a Hugging Face folder, or "owner/name" or "owner/name@revision" of a model that is in the hub's cache on this machine; by default ''"""
    random_init: bool
    """`random_init` takes only the shape from it and draws weights from `seed`; by default false"""
    trust_remote_code: bool
    """whether Python code in the model's folder may run; by default false"""
    dropout: bool
    """Dropout and router jitter that its config brings along are off unless `dropout`: with them the same weights answer differently in training; by default false"""
    dtype: Literal['float32', 'bfloat16']
    """precision in which ranks and replicas compute; master weights are float32; by default float32"""

class TrainerSettings(TypedDict, total=False):
    steps: int
    """steps of reinforcement learning; by default 100"""
    prompts_per_step: int
    """different prompts of a step; by default 16"""
    group_size: int
    """completions of a prompt, which are compared with each other; a step generates and trains `prompts_per_step` times as many; by default 16"""
    updates_per_step: int
    """optimizer steps of a step, each on an equal part of its completions; after the first, training is off-policy; by default 1"""
    validate_every: int
    """steps between validations; 0 = only at the ends; by default 10"""
    validation_prompts: int
    """With `validation_prompts` 0 there is no validation; by default 256"""
    save_every: int
    """steps between checkpoints; 0 = only when asked to stop; by default 20"""
    keep_checkpoints: int
    """how many of the newest checkpoints stay; by default 2"""
    sample_every: int
    """steps between those whose samples are kept; 0 = never; by default 10"""
    step_timeout_s: float
    """`step_timeout_s` bounds each wait of the driver in which nothing moves; by default 600.0"""
    epochs: int
    """`epochs` counts in place of `steps`: one is as many steps as the prompts of the task fill, each prompt once. 0: `steps` says; by default 0"""

class WarmupSettings(TypedDict, total=False):
    steps: int
    """Supervised training before reinforcement learning, or alone; `steps` 0 = none; by default 0"""
    batch_size: int
    """examples of a supervised step; by default 64"""
    lr: float | None
    """`lr` None: 1e-5 for a model that was trained before (1e-4 for adapters over one), 1e-3 for one whose weights are drawn; by default null"""

class RewardSettings(TypedDict, total=False):
    concurrency: int
    """calls at a time, each in a process; coroutines share one loop; by default 32"""
    timeout_s: float
    """after which a call is ended; by default 60.0"""
    max_attempts: int
    """how often a call that fails is tried; by default 2"""
    on_failure: Literal['drop', 'stop']
    """what follows the last failed attempt; by default drop"""
    model: Text
    """`model` is the folder of a reward model (`algorithm=reward_model` makes one), whose score is the reward in place of the task's; by default ''"""

class EnvironmentSettings(TypedDict, total=False):
    rollout: Text
    """class of your own that makes scored groups of prompts, "package.module:Name" or "folder/file.py:Name"; by default ''"""
    args: Mapping[str, object]
    """what `rollout` is made with, beside its setup; by default {}"""
    path: Text
    """Several turns, in the environment that `path` names; by default ''"""
    max_turns: int
    """after which a trajectory ends; by default 8"""
    max_tokens: int
    """most of a trajectory, sampled and observed; the prompt is not counted; by default 1024"""
    max_seconds: float
    """after which a trajectory ends; 0 = never; by default 0.0"""
    reward_from: Literal['environment', 'task', 'both']
    """Who says what a trajectory of several turns is worth: its environment, the task, or both, added up; by default environment"""

class SamplingSettings(TypedDict, total=False):
    max_tokens: int
    """most tokens of a completion; by default 32"""
    temperature: float
    """divides the logits before sampling; by default 1.0"""
    stop: list[str] | tuple[str, ...]
    """One ends at the tokens that the task names, and with the token whose text completes one of `stop`; by default []"""

class SyncSettings(TypedDict, total=False):
    transport: Text
    """How new weights reach the replicas: by where the processes are, unless a `transport` is named; by default auto"""
    bucket_mib: float | None
    """32 in host memory, 512 on GPUs; by default null"""
    transfer_timeout_s: float
    """Of the deadlines of its phases `transfer_timeout_s` is one; a flip may take a fifth of it, the others a tenth; by default 300.0"""
    canary: bool
    """`canary` asks every replica a fixed question after its flip; an answer further than `canary_tolerance` (log-probs: nats) from what most say fences it off; by default false"""

class ClusterSettings(TypedDict, total=False):
    ray_address: Text
    """Empty `ray_address` starts a private Ray on this machine. With `ray_address` the run may have several machines; by default ''"""
    num_devices: int
    """`num_devices` 0 = count them; by default 0"""
    placement: Literal['separate', 'colocated']
    """On GPU every rank and every tensor-parallel rank of a replica has a device of its own, unless `placement` is "colocated" (sync mode only): then ranks and replicas share theirs; by default separate"""
    health_timeout_s: float
    """In `health_timeout_s` they are asked for their health twelve times; by default 60.0"""
    rendezvous_host: Text
    """Processes meet at `rendezvous_host`, an address of training rank 0's machine; empty, it is loopback while all are on one machine, else the address that Ray knows that machine by; by default ''"""
    object_store_mib: int
    """size of Ray's object store; by default 512"""
    device_memory_gib: float
    """`device_memory_gib` is what one GPU has there, for a plan that is made where there is none; 0: what this machine's GPUs have; by default 0.0"""

class ReportSettings(TypedDict, total=False):
    console: bool
    """whether the terminal shows progress; by default true"""
    trackers: list[str] | tuple[str, ...]
    """`trackers` are any of "tensorboard", "wandb" (sent later, with `wandb sync`), "wandb_online", "trackio", which stays on this machine, and those of others, see `offbeat_recipes.run.reporting`. "trajectories" keeps all that each step trained, to be read, "trajectories_<n>" that of n prompts a step; by default [tensorboard]"""

class EngineSettings(TypedDict, total=False):
    optimizer: EngineOptimizerSettings
    micro_batch_tokens: int
    """`micro_batch_tokens` is the budget of one micro-batch on one rank, in tokens after packing; a single longer sequence gets a micro-batch of its own; by default 16384"""
    activation_checkpointing: bool
    """Backward computes layers again, which takes time and saves memory; by default false"""
    offload_parameters: bool
    """weights and gradients in host memory outside the modes; by default false"""
    offload_optimizer: bool
    """moments in host memory outside the optimizer's step; by default false"""
    lora: EngineLoraSettings
    freeze: list[str] | tuple[str, ...]
    """`freeze` are patterns (fnmatch) over Hugging Face weight names that are not trained; by default []"""
    deterministic: bool
    """`deterministic` asks for deterministic kernels and refuses others; by default false"""
    on_nonfinite: Literal['stop', 'skip']
    """what follows a gradient that is not finite; by default stop"""
    packing: bool
    """sequences of a micro-batch are one row without padding; by default true"""
    share_prefixes: bool
    """what several sequences begin with is computed once; by default true"""
    activation_offload: bool
    """`activation_offload` keeps what backward needs in host memory; by default false"""
    sequence_parallel_size: int
    """`sequence_parallel_size` ranks share the tokens of each sequence (Ulysses, arXiv 2309.14509); by default 1"""
    shard_size: int
    """`shard_size` ranks hold one copy of the weights among them, the copies are replicas of each other (hybrid sharding); 0 = all ranks. In bfloat16 every micro-batch is reduced by itself, which sends half the bytes, but more often where `reshard` or `shard_size` would else reduce once; by default 0"""
    compile: bool
    """`compile` compiles every layer; by default false"""
    reshard: Literal['auto', 'always', 'never']
    """`reshard` says when a rank lets go of the weights that it gathered: "always" after each layer, forward and backward; "never" before the mini-batch ends (faster, at the memory of the whole model in the compute dtype); "auto" is "always", but a model of at most 256 MiB, and one that each rank holds and trains as a whole, is gathered once. In bfloat16 every micro-batch is reduced by itself, which sends half the bytes, but more often where `reshard` or `shard_size` would else reduce once; by default auto"""
    reduce_dtype: Literal['float32', 'bfloat16']
    """`reduce_dtype` is the precision in which gradients are added up over ranks; micro-batches are added up in float32; by default float32"""
    checkpoint_keeps: Literal['inputs', 'products']
    """what activation_checkpointing keeps of a layer: its inputs, or matrix products and attention too; by default inputs"""
    attention: Literal['auto', 'eager', 'sdpa', 'varlen']
    """`attention` picks the kernel; by default auto"""
    name: Literal['fsdp2', 'megatron']
    """training engine: an installed one, or the path of a class; by default fsdp2"""
    num_ranks: int
    """processes that train, a device each on GPU; by default 1"""
    threads_per_rank: int
    """`threads_per_rank` 0 shares the cores among the ranks; by default 0"""
    tensor_parallel_size: int
    """ranks that share every matrix; by default 1"""
    pipeline_parallel_size: int
    """groups of ranks that share the layers; by default 1"""
    virtual_pipeline_size: int
    """runs of layers that each has (arXiv 2104.04473); by default 1"""
    sequence_parallel: bool
    """With `sequence_parallel` the ranks of a tensor share what lies between the matrices, too (arXiv 2205.05198); by default false"""
    expert_parallel_size: int
    """copies that share the experts of a mixture; by default 1"""
    context_parallel_size: int
    """`context_parallel_size` ranks share the tokens of every sequence, in attention too: keys and values go to all of them; by default 1"""
    dispatcher: Literal['allgather', 'alltoall']
    """how tokens reach experts; by default alltoall"""
    distributed_optimizer: bool
    """`distributed_optimizer` shares moments and master weights among copies; by default true"""
    recompute: Literal['layers', 'attention']
    """With `activation_checkpointing`, `recompute` says what backward computes again: whole layers, or attention alone; by default layers"""
    transformer_engine: Literal['auto', 'e4m3', 'hybrid', True, False]
    """`transformer_engine` takes its matrices and its attention over packed rows, for bfloat16 on CUDA: where all ranks have it (`auto`), or else refused (true); by default false"""
    megatron_args: Mapping[str, object]
    """`megatron_args` are settings of megatron-core's own, by its names: fusions, grouped experts, `overlap_grad_reduce`, with which a step takes one training call; by default {}"""

class EngineOptimizerSettings(TypedDict, total=False):
    name: Literal['adamw', 'adamw_8bit', 'adafactor']
    """which optimizer; by default adamw"""
    lr: float
    """learning rate; by default 1e-06"""
    beta1: float
    """decay of the first moment; by default 0.9"""
    beta2: float
    """decay of the second moment; by default 0.95"""
    eps: float
    """added to the root of the second moment; by default 1e-08"""
    weight_decay: float
    """decoupled weight decay; by default 0.0"""
    max_grad_norm: float
    """One optimizer on float32 master weights; `max_grad_norm` <= 0 turns clipping off; by default 1.0"""
    schedule: Literal['constant', 'linear', 'cosine']
    """how the learning rate goes on after it has risen; by default constant"""
    warmup_steps: int
    """optimizer steps in which the learning rate rises; by default 0"""
    min_lr_ratio: float
    """where the schedule ends, as a share of `lr`; by default 0.0"""

class EngineLoraSettings(TypedDict, total=False):
    rank: int
    """of the adapters, which alone are trained; 0: all weights are; by default 0"""
    alpha: float
    """the product of the adapters is scaled by alpha / rank; by default 16.0"""
    dropout: float
    """share of an adapter's inputs that is zeroed; by default 0.0"""
    targets: list[str] | tuple[str, ...]
    """`targets` are endings of module names; empty means every linear layer but the head; by default []"""
    export: Literal['merged', 'adapter']
    """What `named_weights` yields with LoRA: base weights with the adapter merged in, or the adapter alone; by default merged"""

class RolloutSettings(TypedDict, total=False):
    max_model_len: int
    """`max_model_len` bounds prompt plus completion, in tokens; by default 512"""
    max_num_seqs: int
    """most sequences that a replica generates at a time; by default 256"""
    tensor_parallel_size: int
    """`tensor_parallel_size` is the number of devices; by default 1"""
    kv_cache_gib: float
    """memory for keys and values, on CPU; by default 1.0"""
    gpu_memory_fraction: float
    """share of a GPU's memory that a replica may take; by default 0.85"""
    cpu_threads: int
    """`cpu_threads` 0: colocated, the cores are shared among the replicas, as they are among the ranks; else one each; by default 0"""
    record_experts: bool
    """With `record_experts` completions tell which experts of a mixture each token went to; by default false"""
    enforce_eager: bool | None
    """no CUDA graphs; null: on CPU alone; by default null"""
    prefix_caching: bool | None
    """what prompts begin with is kept; null: on CUDA alone; by default null"""
    engine_args: Mapping[str, object]
    """`engine_args` are further arguments of vLLM's `AsyncEngineArgs`, by vLLM's names; see `arguments` for those that are not taken; by default {}"""
    name: Literal['hf', 'sglang', 'vllm']
    """adapter of the generation engine; by default vllm"""
    num_replicas: int
    """copies of the generation engine; by default 1"""
    environment: Text
    """`environment` is the folder of the virtual environment that SGLang is installed in; empty means the one beside this, with `-sglang` behind its name, which `tools/setup` makes; by default ''"""
    deterministic: bool
    """`deterministic` makes SGLang honour seeds, whatever else is in the batch: without it SGLang ignores them; by default true"""
    server_args: Mapping[str, object]
    """`server_args` are further arguments of SGLang's `ServerArgs`, by SGLang's names; see `arguments` for those that are not taken; by default {}"""

class AlgorithmSettings(TypedDict, total=False):
    aggregation: Literal['token_mean', 'seq_mean_token_sum', 'seq_mean_token_mean', 'seq_mean_token_sum_norm']
    """How token losses become one number; see `offbeat_trainer.algorithms.policy_loss`; by default token_mean"""
    clip_low: float
    """the importance ratio counts down to 1 - clip_low; by default 0.2"""
    clip_high: float
    """the importance ratio counts up to 1 + clip_high; by default 0.28"""
    dual_clip: float
    """> 1 bounds the loss of negative advantages; 0 = off; by default 0.0"""
    kl_coef: float
    """weight of the KL to a reference model; 0: none is loaded; by default 0.0"""
    kl_estimator: Literal['k1', 'k2', 'k3', 'k3_plus', 'abs', 'unbiased', 'full']
    """Schulman's estimators of KL(policy || reference); UNBIASED is k3 weighted for who sampled the token, the others are not; by default k3"""
    entropy_coef: float
    """weight of the entropy bonus in the loss; 0 = off; by default 0.0"""
    proximal: Literal['recompute', 'rollout']
    """`proximal` and the `correction*` settings say what happens to tokens that another policy sampled; docs/asynchrony.md justifies them; by default recompute"""
    correction: Literal['none', 'truncate', 'mask', 'icepop']
    """What becomes of the importance weight trainer / sampler; see `offbeat_trainer.algorithms.policy_loss`; by default truncate"""
    correction_level: Literal['token', 'sequence', 'geometric']
    """Over what the weight is taken: each token, the product over a completion, or its geometric mean; by default token"""
    correction_low: float
    """lower bound of the importance weight where the correction has one; by default 0.5"""
    correction_high: float
    """upper bound of the importance weight; by default 2.0"""
    advantage: Literal['grpo', 'dr_grpo', 'rloo', 'loo_grpo', 'opo', 'pass_at_k', 'max_rl', 'batch_std', 'domain_std', 'otb']
    """How rewards become advantages; formulas and sources in `offbeat_trainer.algorithms.advantages`; by default grpo"""
    std_epsilon: float
    """added to the standard deviation that advantage=grpo divides by; by default 1e-06"""
    per_turn: bool
    """trajectories are compared turn by turn; see `turn_advantages`; by default false"""
    dynamic_sampling: bool
    """groups of equal rewards are left out and replaced (arXiv 2503.14476); by default false"""
    kl_in: Literal['loss', 'reward']
    """Where the KL to the reference counts: as a term of the loss, or in the reward of a completion before advantages are taken; by default loss"""
    kl_target: float
    """KL per token that `kl_coef` steers towards; 0 = off; by default 0.0"""
    entropy_target: float
    """entropy that `entropy_coef` steers towards; 0 = off; by default 0.0"""
    reference_every: int
    """steps after which the reference is made anew; 0 = never; by default 0"""
    reference_keep: float
    """share of the reference that stays; the rest is the policy; by default 0.0"""
    name: Literal['cispo', 'clip_cov', 'cpo', 'dapo', 'distill', 'dpo', 'dppo', 'dr_grpo', 'dro', 'gdpo', 'gmpo', 'gpg', 'grpo', 'gspo', 'kl_cov', 'kto', 'luspo', 'm2po', 'opsm', 'orpo', 'ppo', 'reinforce_pp', 'reinforce_pp_baseline', 'rejection', 'remax', 'reward_model', 'rloo', 'sapo', 'simpo', 'vespo']
    """`name` is an installed algorithm, or the path of a class (`mine.py:Mine`); the rest are its settings; by default grpo"""
    scale: Literal['absolute', 'relative']
    """What bounds CISPO's weight: `ratio_cap` (TRL, ScaleRL), or 1 - `clip_low` .. 1 + `clip_high` (verl, NeMo-RL); by default absolute"""
    ratio_cap: float
    """largest weight of scale=absolute; by default 5.0"""
    fraction: float
    """tokens left out; by default 0.0002"""
    beta: float
    """scales log-probs; by default 0.1"""
    sft_coef: float
    """weight of the likelihood of the chosen completion, per token; by default 1.0"""
    overlong_buffer: float
    """In the last `overlong_buffer` of the longest length (a fraction; 0 = no such part) a completion's reward falls, by 1 at its end; by default 0.2"""
    teacher_path: Text
    """`teacher_path` is the Hugging Face folder of a model with the policy's vocabulary; by default ''"""
    teachers: Mapping[str, Text]
    """`teachers` names those of others by domain: completions of a prompt whose `domain` is there learn from that one; by default {}"""
    gain_clip: float
    """`gain_clip` bounds log teacher - log policy of a token on both sides (0 = off); by default 0.0"""
    divergence: Literal['sampled', 'forward_kl', 'reverse_kl', 'jsd'] | Literal['tv', 'kl']
    """of policy and teacher: of the sampled token alone, or of more; by default sampled"""
    top_k: int
    """likeliest tokens of the teacher that a divergence compares, all of them where it has no more; the rest are one; by default 64"""
    jsd_beta: float
    """the teacher's part in the mixture of jsd; by default 0.5"""
    loss: Literal['sigmoid', 'sigmoid_norm', 'hinge', 'ipo', 'robust', 'exo', 'nca', 'bco', 'sppo', 'apo_zero', 'apo_down']
    """The loss of a pair; formulas and sources in `offbeat_trainer.algorithms.written.pairs`; by default sigmoid"""
    label_smoothing: float
    """DPO (arXiv 2305.18290): `beta` holds the policy to the reference, `label_smoothing` is the chance that a pair is swapped; by default 0.0"""
    part_weights: Mapping[str, float]
    """GDPO (arXiv 2601.05242); `part_weights` weigh the normalised rewards by name, 1 where one is not named; by default {}"""
    penalty: float
    """weight of |log ratio| of a token that is held back; by default 1.0"""
    desirable_weight: float
    """weight of completions that are called desirable; by default 1.0"""
    undesirable_weight: float
    """weight of those that are called undesirable; by default 1.0"""
    threshold: float
    """largest mean square of the log ratio; by default 0.04"""
    odds_coef: float
    """ORPO (arXiv 2403.07691): `odds_coef` weighs the odds ratio beside the likelihood of the chosen completion; by default 0.1"""
    discount: float
    """gamma of GAE; by default 1.0"""
    trace: float
    """lambda of GAE; by default 0.95"""
    whiten: bool
    """whether advantages are brought to mean 0 and deviation 1: noise, where nearly all completions are right; by default true"""
    value_clip: float
    """`value_clip` bounds how far a value moves in a step (0 = off); by default 0.5"""
    critic_path: Text
    """`critic_path` "" starts the critic from the model of the run, with a new head; by default ''"""
    critic_engine: Text
    """`critic_engine` "" is the run's: another training engine holds the critic on the same ranks, with what engines have in common as the run has it and its defaults for the rest; by default ''"""
    critic_lr: float
    """learning rate of the critic; by default 1e-05"""
    critic_warmup_steps: int
    """`critic_warmup_steps` first steps train the critic alone; by default 0"""
    best_of_group: int
    """Rejection sampling: the `best_of_group` completions of a prompt are learned (0 = all), as far as they earn `min_reward`; by default 1"""
    min_reward: float | None
    """least reward of a completion that is learned; None = any; by default null"""
    margin: float
    """what the chosen score must lead by; by default 0.0"""
    centre_coef: float
    """weight of the square of the pair's sum, which keeps scores near 0; by default 0.0"""
    temperature_positive: float
    """steepness of the gate where A > 0; by default 1.0"""
    temperature_negative: float
    """and where A <= 0; by default 1.05"""
    gamma: float
    """SimPO (arXiv 2405.14734): `beta` scales mean log-probs per token, `gamma` is the margin that the chosen one must lead by; by default 1.0"""
    k_positive: float
    """how fast the weight falls below ratio 1 where A >= 0; by default 2.0"""
    lambda_positive: float
    """how fast it falls above ratio 1 where A >= 0; by default 3.0"""
    k_negative: float
    """`k_positive` where A < 0; by default 3.0"""
    lambda_negative: float
    """`lambda_positive` where A < 0; by default 2.0"""

Dotted = TypedDict("Dotted", {
    "mode.name": Literal['sync'] | Literal['one_step_off'] | Literal['fully_async'],
    "mode.over_sampling": float,
    "mode.max_staleness": int,
    "mode.sync_every": int,
    "mode.partial": Literal['keep', 'recompute', 'abort', 'wait'],
    "mode.order": Literal['first_in', 'oldest_version', 'longest_waiting'],
    "task.name": Literal['arithmetic', 'calculator', 'code', 'countdown', 'file', 'gsm8k', 'pairs', 'sql', 'word_game'] | str,
    "task.held_out_fraction": float,
    "task.hidden_size": int,
    "task.num_layers": int,
    "task.num_heads": int,
    "task.intermediate_size": int,
    "task.careless": float,
    "task.level": int,
    "task.carry_share": float,
    "model.path": Text,
    "model.random_init": bool,
    "model.trust_remote_code": bool,
    "model.dropout": bool,
    "model.dtype": Literal['float32', 'bfloat16'],
    "trainer.steps": int,
    "trainer.prompts_per_step": int,
    "trainer.group_size": int,
    "trainer.updates_per_step": int,
    "trainer.validate_every": int,
    "trainer.validation_prompts": int,
    "trainer.save_every": int,
    "trainer.keep_checkpoints": int,
    "trainer.sample_every": int,
    "trainer.step_timeout_s": float,
    "trainer.epochs": int,
    "warmup.steps": int,
    "warmup.batch_size": int,
    "warmup.lr": float | None,
    "reward.concurrency": int,
    "reward.timeout_s": float,
    "reward.max_attempts": int,
    "reward.on_failure": Literal['drop', 'stop'],
    "reward.model": Text,
    "environment.rollout": Text,
    "environment.args": Mapping[str, object],
    "environment.path": Text,
    "environment.max_turns": int,
    "environment.max_tokens": int,
    "environment.max_seconds": float,
    "environment.reward_from": Literal['environment', 'task', 'both'],
    "sampling.max_tokens": int,
    "sampling.temperature": float,
    "sampling.stop": list[str] | tuple[str, ...],
    "sync.transport": Text,
    "sync.bucket_mib": float | None,
    "sync.transfer_timeout_s": float,
    "sync.canary": bool,
    "cluster.ray_address": Text,
    "cluster.num_devices": int,
    "cluster.placement": Literal['separate', 'colocated'],
    "cluster.health_timeout_s": float,
    "cluster.rendezvous_host": Text,
    "cluster.object_store_mib": int,
    "cluster.device_memory_gib": float,
    "report.console": bool,
    "report.trackers": list[str] | tuple[str, ...],
    "task.steps": int,
    "task.count": int,
    "task.used": int,
    "task.largest": int,
    "task.max_prompt_tokens": int,
    "task.chat_template": Literal['auto', 'always', 'never'],
    "task.train_path": Text | list[str] | tuple[str, ...],
    "task.validation_path": Text | list[str] | tuple[str, ...],
    "task.columns": Mapping[str, Text],
    "task.filter": Text,
    "task.overlong": Literal['refuse', 'filter'],
    "task.reward": Text | list[str] | tuple[str, ...],
    "task.reward_weights": list[float] | tuple[float, ...],
    "task.correct_at": float | None,
    "task.answer": Literal['strict', 'flexible'],
    "task.rows": int,
    "task.letters": int,
    "task.length": int,
    "task.guesses": int,
    "engine.optimizer.name": Literal['adamw', 'adamw_8bit', 'adafactor'],
    "engine.optimizer.lr": float,
    "engine.optimizer.beta1": float,
    "engine.optimizer.beta2": float,
    "engine.optimizer.eps": float,
    "engine.optimizer.weight_decay": float,
    "engine.optimizer.max_grad_norm": float,
    "engine.optimizer.schedule": Literal['constant', 'linear', 'cosine'],
    "engine.optimizer.warmup_steps": int,
    "engine.optimizer.min_lr_ratio": float,
    "engine.micro_batch_tokens": int,
    "engine.activation_checkpointing": bool,
    "engine.offload_parameters": bool,
    "engine.offload_optimizer": bool,
    "engine.lora.rank": int,
    "engine.lora.alpha": float,
    "engine.lora.dropout": float,
    "engine.lora.targets": list[str] | tuple[str, ...],
    "engine.lora.export": Literal['merged', 'adapter'],
    "engine.freeze": list[str] | tuple[str, ...],
    "engine.deterministic": bool,
    "engine.on_nonfinite": Literal['stop', 'skip'],
    "engine.packing": bool,
    "engine.share_prefixes": bool,
    "engine.activation_offload": bool,
    "engine.sequence_parallel_size": int,
    "engine.shard_size": int,
    "engine.compile": bool,
    "engine.reshard": Literal['auto', 'always', 'never'],
    "engine.reduce_dtype": Literal['float32', 'bfloat16'],
    "engine.checkpoint_keeps": Literal['inputs', 'products'],
    "engine.attention": Literal['auto', 'eager', 'sdpa', 'varlen'],
    "engine.name": Literal['fsdp2', 'megatron'] | str,
    "engine.num_ranks": int,
    "engine.threads_per_rank": int,
    "engine.tensor_parallel_size": int,
    "engine.pipeline_parallel_size": int,
    "engine.virtual_pipeline_size": int,
    "engine.sequence_parallel": bool,
    "engine.expert_parallel_size": int,
    "engine.context_parallel_size": int,
    "engine.dispatcher": Literal['allgather', 'alltoall'],
    "engine.distributed_optimizer": bool,
    "engine.recompute": Literal['layers', 'attention'],
    "engine.transformer_engine": Literal['auto', 'e4m3', 'hybrid', True, False],
    "engine.megatron_args": Mapping[str, object],
    "rollout.max_model_len": int,
    "rollout.max_num_seqs": int,
    "rollout.tensor_parallel_size": int,
    "rollout.kv_cache_gib": float,
    "rollout.gpu_memory_fraction": float,
    "rollout.cpu_threads": int,
    "rollout.record_experts": bool,
    "rollout.enforce_eager": bool | None,
    "rollout.prefix_caching": bool | None,
    "rollout.engine_args": Mapping[str, object],
    "rollout.name": Literal['hf', 'sglang', 'vllm'] | str,
    "rollout.num_replicas": int,
    "rollout.environment": Text,
    "rollout.deterministic": bool,
    "rollout.server_args": Mapping[str, object],
    "algorithm.aggregation": Literal['token_mean', 'seq_mean_token_sum', 'seq_mean_token_mean', 'seq_mean_token_sum_norm'],
    "algorithm.clip_low": float,
    "algorithm.clip_high": float,
    "algorithm.dual_clip": float,
    "algorithm.kl_coef": float,
    "algorithm.kl_estimator": Literal['k1', 'k2', 'k3', 'k3_plus', 'abs', 'unbiased', 'full'],
    "algorithm.entropy_coef": float,
    "algorithm.proximal": Literal['recompute', 'rollout'],
    "algorithm.correction": Literal['none', 'truncate', 'mask', 'icepop'],
    "algorithm.correction_level": Literal['token', 'sequence', 'geometric'],
    "algorithm.correction_low": float,
    "algorithm.correction_high": float,
    "algorithm.advantage": Literal['grpo', 'dr_grpo', 'rloo', 'loo_grpo', 'opo', 'pass_at_k', 'max_rl', 'batch_std', 'domain_std', 'otb'],
    "algorithm.std_epsilon": float,
    "algorithm.per_turn": bool,
    "algorithm.dynamic_sampling": bool,
    "algorithm.kl_in": Literal['loss', 'reward'],
    "algorithm.kl_target": float,
    "algorithm.entropy_target": float,
    "algorithm.reference_every": int,
    "algorithm.reference_keep": float,
    "algorithm.name": Literal['cispo', 'clip_cov', 'cpo', 'dapo', 'distill', 'dpo', 'dppo', 'dr_grpo', 'dro', 'gdpo', 'gmpo', 'gpg', 'grpo', 'gspo', 'kl_cov', 'kto', 'luspo', 'm2po', 'opsm', 'orpo', 'ppo', 'reinforce_pp', 'reinforce_pp_baseline', 'rejection', 'remax', 'reward_model', 'rloo', 'sapo', 'simpo', 'vespo'] | str,
    "algorithm.scale": Literal['absolute', 'relative'],
    "algorithm.ratio_cap": float,
    "algorithm.fraction": float,
    "algorithm.beta": float,
    "algorithm.sft_coef": float,
    "algorithm.overlong_buffer": float,
    "algorithm.teacher_path": Text,
    "algorithm.teachers": Mapping[str, Text],
    "algorithm.gain_clip": float,
    "algorithm.divergence": Literal['sampled', 'forward_kl', 'reverse_kl', 'jsd'] | Literal['tv', 'kl'],
    "algorithm.top_k": int,
    "algorithm.jsd_beta": float,
    "algorithm.loss": Literal['sigmoid', 'sigmoid_norm', 'hinge', 'ipo', 'robust', 'exo', 'nca', 'bco', 'sppo', 'apo_zero', 'apo_down'],
    "algorithm.label_smoothing": float,
    "algorithm.part_weights": Mapping[str, float],
    "algorithm.penalty": float,
    "algorithm.desirable_weight": float,
    "algorithm.undesirable_weight": float,
    "algorithm.threshold": float,
    "algorithm.odds_coef": float,
    "algorithm.discount": float,
    "algorithm.trace": float,
    "algorithm.whiten": bool,
    "algorithm.value_clip": float,
    "algorithm.critic_path": Text,
    "algorithm.critic_engine": Text,
    "algorithm.critic_lr": float,
    "algorithm.critic_warmup_steps": int,
    "algorithm.best_of_group": int,
    "algorithm.min_reward": float | None,
    "algorithm.margin": float,
    "algorithm.centre_coef": float,
    "algorithm.temperature_positive": float,
    "algorithm.temperature_negative": float,
    "algorithm.gamma": float,
    "algorithm.k_positive": float,
    "algorithm.lambda_positive": float,
    "algorithm.k_negative": float,
    "algorithm.lambda_negative": float,
}, total=False)

def _takes(
    self: object,
    *,
    model: ModelSettings | Text | None = ...,
    reward: RewardSettings | Reward | Sequence[Reward] | None = ...,
    data: object = ...,
    validation: object = ...,
    environment: EnvironmentSettings | Callable[..., object] | str | None = ...,
    algorithm: AlgorithmSettings | OwnSettings | type | str | None = ...,
    task: TaskSettings | OwnSettings | type | Task | str | None = ...,
    engine: EngineSettings | OwnSettings | Literal['fsdp2', 'megatron'] = ...,
    hardware: Literal['a100x8', 'cpu', 'gb200x4x2', 'h100x1', 'h100x8', 'h200x1'] = ...,
    mode: ModeSettings | Literal['fully_async', 'one_step_off', 'sync'] = ...,
    rollout: RolloutSettings | OwnSettings | Literal['hf', 'sglang', 'vllm'] = ...,
    sync: SyncSettings | Literal['auto', 'broadcast', 'disk'] = ...,
    recipe: Literal['nemo-rl-006907a', 'trl-1.16', 'verl-0.9'] = ...,
    trainer: TrainerSettings = ...,
    warmup: WarmupSettings = ...,
    sampling: SamplingSettings = ...,
    cluster: ClusterSettings = ...,
    report: ReportSettings = ...,
    name: Text = ...,
    run_dir: Text = ...,
    seed: int = ...,
    resume: Literal['never', 'auto'] = ...,
    replay: Text = ...,
    device: Literal['cpu', 'cuda'] = ...,
    **settings: Unpack[Dotted],
) -> None: ...

def _like(typed: Callable[P, None]) -> Callable[[Callable[..., None]], Callable[P, None]]: ...

takes_settings = _like(_takes)

class _Function(Protocol[P]):
    def __call__(self, function: Callable[..., R], /) -> Callable[P, R]: ...

def _without_self(typed: Callable[Concatenate[object, P], None]) -> _Function[P]: ...

function_takes_settings = _without_self(_takes)
