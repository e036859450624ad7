"""What a mixture's routers choose while the Transformers adapter generates. L = layers, K = experts of a token."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers' models are typed loosely.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat_rollout.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel


class Recorder:
    """Listens to the routers of one model: modules of transformers 5 that answer with logits, scores and experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Begin to listen.

        Raises:
            ConfigError: the model has no routers of that kind.
        """
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if not routers:
            raise ConfigError(
                f"`record_experts`: {type(model).__name__} has no routers that tell what they choose; leave the setting out"
            )
        self._chosen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._keep)

    def _keep(self, _: object, __: object, output: Any) -> None:  # noqa: ANN401
        self._chosen.append(output[2])

    def take(self) -> npt.NDArray[np.int16]:
        """Return the experts of every token of the last forward pass [tokens, L, K], and forget them."""
        chosen = torch.stack(self._chosen, 1).to("cpu", torch.int16)
        self._chosen.clear()
        return chosen.numpy()
