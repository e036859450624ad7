"""`offbeat chat`: talk to a model that a run trained, in a terminal, by Transformers in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offbeat_recipes.cli._environment import USAGE, command_parser, options_of, prepare_environment

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_EPILOG = """\
  offbeat chat runs/demo                 # the model that the run ended with
  offbeat chat runs/demo/exports/step_20 --temperature 0.7
Each line is a turn of the user; an empty one begins a new conversation; Ctrl-D ends it. Without a chat template a line is
a prompt that the model goes on with. Input may come from a pipe.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Read lines and print what the model says to each; return 0, or 2 where there is no model."""
    made = command_parser("offbeat chat", "Talk to a model.", _EPILOG)
    made.add_argument("model", type=Path, metavar="RUN", help="the folder of a run that ended, or of a model")
    made.add_argument("--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer")
    made.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    made.add_argument("--system", metavar="TEXT", help="what the chat template says first")
    made.add_argument("--trust-remote-code", action="store_true", help="run code that the model's folder has")
    options = options_of(made, argv)
    final = options.model / "final"
    folder: Path = final if (final / "config.json").is_file() else options.model
    if not (folder / "config.json").is_file():
        sys.stderr.write(
            f"{made.prog}: {options.model} is no model, and no run that ended; offbeat export {options.model} writes a checkpoint "
            "as a model\n"
        )
        return USAGE
    prepare_environment()
    try:
        _talk(folder, options)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return 0


def _talk(folder: Path, options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    own_code = {"local_files_only": True, "trust_remote_code": options.trust_remote_code}
    tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(folder, **own_code)
    model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(folder, **own_code)
    streamer: Any = cast("Any", TextStreamer)(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = (
        {"do_sample": True, "temperature": options.temperature}
        if options.temperature
        else {"do_sample": False}
    )
    begin = [{"role": "system", "content": options.system}] if options.system else []
    talk = list(begin)
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        sys.stdout.write(prompt)
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            break
        if not line.strip():
            talk = list(begin)
            continue
        text = line.rstrip("\n")
        if tokenizer.chat_template:
            talk.append({"role": "user", "content": text})
            inputs = tokenizer.apply_chat_template(
                talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(text, return_tensors="pt")
        inputs = {key: inputs[key].to(model.device) for key in ("input_ids", "attention_mask")}
        out = model.generate(
            **inputs,
            max_new_tokens=options.max_tokens,
            streamer=streamer,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        talk.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    sys.exit(main())
