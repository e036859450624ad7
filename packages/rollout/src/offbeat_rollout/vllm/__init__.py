"""The vLLM adapter. vLLM itself is imported at `start`, in the process that runs the engine."""

# pyright: reportUnknownVariableType=false
import lazy_loader

# The names and their modules stand in __init__.pyi: whoever reads settings needs no arrays.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
