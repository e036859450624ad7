from .config import VllmConfig as VllmConfig
from .engine import VllmEngine as VllmEngine
from .processes import vllm_environment as vllm_environment
