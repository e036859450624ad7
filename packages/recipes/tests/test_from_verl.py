"""`offbeat import`: scripts and files of verl become settings that a run takes, and what has none is named with its reason."""

import shlex

import pytest

from offbeat_recipes.cli._hydra import compose_run
from offbeat_recipes.cli.main import main
from offbeat_recipes.errors import SettingError
from offbeat_recipes.settings.from_verl import read_verl, translated

SCRIPT = """
set -x
MODEL=Qwen/Qwen2.5-0.5B-Instruct   # the policy
GPUS=${GPUS:-8}
DATA=$HOME_OF_DATA/gsm8k
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=/data/gsm8k/train.parquet data.val_files="['/data/gsm8k/test.parquet']" \\
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \\
    data.filter_overlong_prompts=True data.truncation='error' data.tool=$DATA \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum \\
    actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.top_p=0.9 \\
    +actor_rollout_ref.rollout.engine_kwargs.x=1 \\
    custom_reward_function.path=rewards.py \\
    trainer.n_gpus_per_node=$GPUS trainer.nnodes=2 trainer.save_freq=-1 trainer.test_freq=5 \\
    trainer.total_epochs=15 trainer.logger="['console','wandb','swanlab']" "$@"
"""


def test_a_script_becomes_settings_that_a_run_takes(tmp_path, capsys):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    assert main(["import", str(file)]) == 0
    out = capsys.readouterr().out
    command = shlex.split(out.replace("\\\n", " "), comments=True)
    assert command[:2] == ["offbeat", "train"]
    config = compose_run(command[2:])
    assert (config.trainer.prompts_per_step, config.trainer.group_size, config.trainer.updates_per_step) == (
        256,
        5,
        4,
    )
    assert (config.engine.num_ranks, config.rollout.num_replicas, config.rollout.tensor_parallel_size) == (
        16,
        8,
        2,
    )
    assert (config.rollout.max_model_len, config.sampling.max_tokens, config.task.overlong) == (
        1536,
        1024,
        "filter",
    )
    algorithm = config.algorithm
    assert (algorithm.kl_coef, algorithm.kl_estimator, algorithm.clip_low, algorithm.clip_high) == (
        0.002,
        "k3",
        0.2,
        0.28,
    )
    assert (algorithm.aggregation, config.engine.optimizer.lr) == ("seq_mean_token_sum", 1e-6)
    assert (config.trainer.save_every, config.trainer.validate_every, config.report.trackers) == (
        0,
        5,
        ("wandb",),
    )
    assert (config.task.reward, config.trainer.epochs) == ("rewards.py:compute_score", 15)
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    notes = [line for line in out.splitlines() if line.startswith("# ")]
    for key in (
        "data.truncation",
        "ppo_micro_batch_size_per_gpu",
        "top_p",
        "swanlab",
        "data.tool",
    ):
        assert any(key in line for line in notes), key
    assert notes[-1] == "# nothing is known of 2 more: data.tool, actor_rollout_ref.rollout.engine_kwargs.x"


def test_a_composed_file_and_a_list_of_overrides_say_the_same(tmp_path):
    composed, overrides = tmp_path / "config.yaml", tmp_path / "overrides.yaml"
    composed.write_text(
        "actor_rollout_ref:\n  actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 4}, clip_ratio_c: null}\n"
        "  model: {enable_gradient_checkpointing: true, lora_rank: 8, target_modules: all-linear}\nhydra: {run: {dir: x}}\n"
    )
    overrides.write_text(
        "- actor_rollout_ref.actor.strategy=megatron\n- actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4\n"
        "- ++actor_rollout_ref.model.enable_gradient_checkpointing=True\n- actor_rollout_ref.model.lora_rank=8\n"
    )
    made = translated(read_verl(composed))
    assert made == translated(read_verl(overrides))
    expected = {
        "task": "file", "engine": "megatron", "engine.tensor_parallel_size": 4, "engine.activation_checkpointing": True,
    }  # fmt: skip
    assert made.settings.items() >= expected.items()
    assert made.absent["engine.lora.rank"] == "8 is for engine=fsdp2"


def test_what_a_script_leaves_to_verl_is_verls_own_default_where_ours_is_another():
    made = translated(
        {"data.train_files": "a.parquet", "actor_rollout_ref.model.enable_gradient_checkpointing": False}
    )
    config = compose_run([f"{key}={value}" for key, value in made.settings.items()])
    assert (config.algorithm.name, config.algorithm.trace, config.algorithm.clip_low, config.algorithm.clip_high) == (
        "ppo", 1.0, 0.2, 0.2,
    )  # fmt: skip
    assert (
        config.algorithm.dual_clip,
        config.engine.optimizer.beta2,
        config.engine.optimizer.weight_decay,
    ) == (3.0, 0.999, 0.01)
    assert (config.trainer.prompts_per_step, config.trainer.group_size, config.trainer.updates_per_step) == (
        1024,
        1,
        4,
    )
    assert not config.engine.activation_checkpointing
    assert config.trainer.epochs == 30
    steps = translated({"trainer.total_training_steps": 7}).settings
    assert (steps["trainer.steps"], "trainer.epochs" in steps) == (7, False), (
        "verl takes steps where both are given"
    )


def test_settings_of_another_algorithm_or_engine_are_left_out_and_named():
    made = translated({
        "algorithm.adv_estimator": "grpo", "algorithm.lam": 0.9, "critic.optim.lr": 2e-5, "actor_rollout_ref.actor.strategy": "megatron",
        "actor_rollout_ref.model.enable_activation_offload": True,
    })  # fmt: skip
    assert not {"algorithm.trace", "algorithm.critic_lr", "engine.activation_offload"} & made.settings.keys()
    assert made.absent["algorithm.trace"] == "0.9 is for algorithm=ppo"
    assert made.absent["engine.activation_offload"] == "True is for engine=fsdp2"
    compose_run([f"{key}={value}" for key, value in made.settings.items()])


def test_values_that_lead_to_others_are_followed(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: '${data.train_batch_size}'}, ref: {path: '${nowhere}'}}\ndata: {train_batch_size: 32}\n"
    )
    found = read_verl(file)
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == 32
    assert translated(found).settings["trainer.updates_per_step"] == 1


def test_what_is_no_run_of_verl_is_refused(tmp_path, capsys):
    file = tmp_path / "notes.yaml"
    file.write_text("a: {b: 1}\n")
    with pytest.raises(SettingError, match="no setting of verl"):
        read_verl(file)
    assert main(["import", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml" in capsys.readouterr().err
