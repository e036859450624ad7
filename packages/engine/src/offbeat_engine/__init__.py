"""One training-engine interface for language models, with FSDP2 and megatron-core behind it."""

import lazy_loader

# The names and their modules stand in __init__.pyi: importing the package loads none of them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
