from .config import Fsdp2Config as Fsdp2Config
from .engine import Fsdp2Engine as Fsdp2Engine
