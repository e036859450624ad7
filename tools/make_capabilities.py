"""Write docs/capabilities.md: what each installed engine declares, why not the rest, and what proves it.

Run without arguments to write the page; with --check to fail where the committed one is not what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offbeat_engine import Capabilities, Feature, engine_class, engine_names
from offbeat_engine.testing.models import FAMILIES
from offbeat_engine.testing.runner import Case, Options
from offbeat_engine.testing.suite import cases

PAGE = Path(__file__).resolve().parent.parent / "docs" / "capabilities.md"
FAMILY = "qwen2"
MIXTURE = "mixtral"  # cases of mixtures alone

# What a feature is and how it is asked for, in the words of `EngineConfig`.
MEANINGS: dict[Feature, str] = {
    Feature.PACKING: "sequences lie one after the other without padding: `packing`",
    Feature.DYNAMIC_MICRO_BATCHES: "micro-batches by token budget: `micro_batch_tokens`",
    Feature.ACTIVATION_CHECKPOINTING: "activations are computed again in backward: `activation_checkpointing`",
    Feature.ACTIVATION_OFFLOAD: "activations wait in host memory: `activation_offload`",
    Feature.BFLOAT16: "bfloat16 compute on float32 master weights: `dtype`",
    Feature.VALUE_HEAD: "values instead of log-probabilities: `model.head`",
    Feature.OFFLOAD: "weights, gradients and moments away in host memory: "
    "`offload_parameters`, `offload_optimizer`, `to(...)`",
    Feature.RESHARDING: "a checkpoint loads on another number of ranks",
    Feature.HUGGINGFACE_EXPORT: "a Hugging Face folder: `export_huggingface`",
    Feature.REMOTE_CHECKPOINTS: "checkpoints at any fsspec URL: `remote_path`",
    Feature.LORA: "low-rank adapters: `lora`",
    Feature.FREEZING: "weights that are not trained, by pattern: `freeze`",
    Feature.INFERENCE_ONLY: "weights in the compute dtype and nothing to train: `inference_only`",
    Feature.COMPILE: "torch.compile: `compile`",
    Feature.DETERMINISTIC: "the same bits every time: `deterministic`",
    Feature.HYBRID_SHARDING: "copies of the weights among groups of ranks: `shard_size`",
    Feature.SEQUENCE_PARALLEL: "ranks share the tokens of a sequence: `sequence_parallel_size`",
    Feature.TENSOR_PARALLEL: "ranks share each layer",
    Feature.PIPELINE_PARALLEL: "ranks hold layers one after the other",
    Feature.CONTEXT_PARALLEL: "ranks share the tokens of a sequence in attention, too: keys and values meet there",
    Feature.EXPERT_PARALLEL: "ranks share the experts of a mixture",
    Feature.FP8: "products of matrices in eight bits",
    Feature.MULTIMODAL: "images, sound or video beside the tokens",
    Feature.ROUTED_EXPERTS: "`routed_experts` of a batch in place of the routers' own choice",
    Feature.NAMED_GRADIENTS: "gradients handed out by name: `named_gradients`",
    Feature.TAKE_WEIGHTS: "weights taken over from another engine, whole or a share: `take_weights`",
    Feature.TOP_TOKENS: "log-probabilities of the likeliest tokens, and of tokens that a batch names: `StepContext.top_k`, `top_ids`",
}


def page(declared: list[Capabilities], all_cases: list[Case]) -> str:
    """Return the text of docs/capabilities.md."""
    lines = [
        "# What each engine can do",
        "",
        "Written by `tools/make_capabilities.py` from what the installed engines declare; change those, not this",
        "page. A configuration that asks for what is missing is refused before anything starts. What is declared",
        "is exercised by the conformance suite ([writing-an-engine.md](writing-an-engine.md)), in every model family",
        f"({', '.join(FAMILIES)}) where the cases train. Settings that are no feature (`adamw_8bit`, `reshard`, `reduce_dtype`,",
        "`checkpoint_keeps`, `share_prefixes`) have tests of their own in the package, outside the suite.",
        "",
        f"| feature | {' | '.join(f'`{said.engine}`' for said in declared)} | cases |",
        f"|---|{'---|' * len(declared)}---|",
    ]
    for feature in Feature:
        marks = " | ".join("yes" if feature in said.features else "no" for said in declared)
        declares = any(feature in said.features for said in declared)
        of_its_own = "the engine's own variants" if declares else "none yet"
        proof = ", ".join(f"`{name}`" for name in _proof(feature, all_cases)) or of_its_own
        lines.append(f"| **{feature}**: {MEANINGS[feature]} | {marks} | {proof} |")
    for said in declared:
        most = "any number of ranks" if said.max_ranks is None else f"at most {said.max_ranks} rank(s)"
        lines += ["", f"## `{said.engine}`", "", f"Runs on {' and '.join(sorted(said.devices))}, on {most}."]
        reasons = [f"- {feature}: {said.missing[feature]}" for feature in Feature if feature in said.missing]
        lines += ["", "Missing:", "", *reasons] if reasons else []
    return "\n".join(lines) + "\n"


def _proof(feature: Feature, all_cases: list[Case]) -> list[str]:
    """Return the cases that exercise `feature`, those of all families under one name."""
    names = [case.name for case in all_cases if feature in case.features]
    return list(
        dict.fromkeys(name.replace(f"_{FAMILY}", "_*").replace(f"_{MIXTURE}", "_*") for name in names)
    )


def current() -> str:
    """Return the page as the installed engines would have it now."""
    classes = [engine_class(name) for name in engine_names()]
    return page(
        [engine.capabilities() for engine in classes],
        cases(Options(engine=classes[0], families=(FAMILY, MIXTURE))),
    )


def main() -> None:
    """Write the page, or with --check exit 1 where it is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the page is not current"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write or to check")
    options = parser.parse_args()
    text = current()
    if not options.check:
        options.page.write_text(text)
        print(f"wrote {options.page}")
    elif not options.page.is_file() or options.page.read_text() != text:
        sys.exit(
            f"{options.page} is not what the engines declare; run tools/make_capabilities.py and commit it"
        )


if __name__ == "__main__":
    main()
