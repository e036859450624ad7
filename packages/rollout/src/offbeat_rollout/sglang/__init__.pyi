from .config import SglangConfig as SglangConfig
from .engine import SglangEngine as SglangEngine
