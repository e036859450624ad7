from .config import MegatronConfig as MegatronConfig
from .engine import MegatronEngine as MegatronEngine
