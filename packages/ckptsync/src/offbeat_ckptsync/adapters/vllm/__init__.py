"""The receiving end inside vLLM: weight-transfer backend "offbeat", registered with vLLM's own factory.

vLLM loads `register` through the entry-point group `vllm.general_plugins`; no code of vLLM is patched. Start the
engine with `WeightTransferConfig(backend="offbeat")` and drive it with `ControlMember`, or by hand:

    start_weight_update()
    update_weights({"op": "begin", ..})     every rank checks the offer and stages it while generation goes on
    pause_generation(mode="keep")
    update_weights({"op": "flip", ..})      compares digests, then touches live weights: the only step that does
    finish_weight_update("7")
    resume_generation()

`offbeat_ckptsync.toolkit.ops` says what the requests hold, `ends.rank` how a commit travels and where answers go. Keys and values that were computed under
the old weights stay, as does the prefix cache: clear them in `pause_generation(clear_cache=True)` where that matters.

To send a low-rank adapter alone, start the engine with `enable_lora`, with `additional_config={"offbeat": {"adapter": {"id": 1,
"rank": 8, "alpha": 16.0, "targets": []}}}` (targets: endings of module names; none means every linear layer but the head),
and add an adapter of zeros under that id with `add_lora` before the first request; all requests name it. Then
`finish_weight_update` must not be called: vLLM forgets every adapter there. Leave the session open and say
`update_weight_version("7")`, as the adapter of offbeat-rollout does.
"""

from __future__ import annotations

BACKEND = "offbeat"
"""The name to give to `WeightTransferConfig`."""


def register() -> None:
    """Register the backend; vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        # By name: the engine's module is imported only in the worker that uses it.
        WeightTransferEngineFactory.register_engine(
            BACKEND, "offbeat_ckptsync.adapters.vllm.engine", "OffbeatWeightTransferEngine"
        )
    except ValueError as error:
        if "already registered" not in str(error):
            raise
