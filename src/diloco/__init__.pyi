"""The public names: `diloco/__init__.py` reads this table, and loads each on its first use."""

from diloco.data.sampling import SlotSampler as SlotSampler
from diloco.engine.streaming import StreamingDiLoCo as StreamingDiLoCo
from diloco.errors import CheckpointError as CheckpointError
from diloco.errors import DilocoError as DilocoError
from diloco.errors import DisagreementError as DisagreementError
from diloco.errors import ExchangeError as ExchangeError
from diloco.errors import NonFiniteError as NonFiniteError
from diloco.errors import PayloadError as PayloadError
from diloco.errors import UserError as UserError
from diloco.exchange.connect import connect as connect
from diloco.exchange.process_group import ProcessGroupExchange as ProcessGroupExchange
from diloco.exchange.transport import LoopbackExchange as LoopbackExchange
from diloco.fragments import Fragment as Fragment
from diloco.fragments import sequential as sequential
from diloco.fragments import strided as strided
from diloco.fragments import whole as whole
from diloco.outer.nesterov import Nesterov as Nesterov
from diloco.outer.step import OuterStep as OuterStep
from diloco.publishing.follower import Follower as Follower
from diloco.publishing.publisher import Publisher as Publisher
from diloco.rendezvous.store_rendezvous import StoreRendezvous as StoreRendezvous
from diloco.schedule import Schedule as Schedule
from diloco.version import __version__ as __version__
from diloco.wire import codec as codec

def names_of_stub(module: str, file: str) -> tuple[list[str], object, object]: ...
