from .control.blocking import Replica as Replica, Syncer as Syncer, serve as serve
from .toolkit.config import SyncConfig as SyncConfig, make_transport as make_transport
from .control.manager import CheckpointEngineManager as CheckpointEngineManager
from .control.members import ControlMember as ControlMember, LocalMember as LocalMember, LockGate as LockGate
from .control.ranks import Mailbox as Mailbox
from .errors import SyncError as SyncError, SyncFailed as SyncFailed
from .ends.receiver import Receiver as Receiver
from .ends.sinks import ModuleSink as ModuleSink, ModuleSource as ModuleSource
from .control.agent import Agent as Agent, agent_of as agent_of
from .control.membership import Membership as Membership
from .seams import (
    GenerationGate as GenerationGate,
    NO_TRAFFIC as NO_TRAFFIC,
    Transport as Transport,
    WeightSink as WeightSink,
    WeightSource as WeightSource,
)
from .ends.sender import LocalSource as LocalSource, Sender as Sender
from .values import Manifest as Manifest, RankId as RankId, SyncReport as SyncReport
