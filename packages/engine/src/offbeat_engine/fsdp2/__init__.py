"""The FSDP2 engine: Hugging Face causal models, sharded with `fully_shard`."""

import lazy_loader

# As in offbeat_engine: the engine imports torch; who only reads its settings does not.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
