"""The names for extensions: `diloco/extend.py` reads this table, and loads each on its first use."""

from diloco.engine.parameters import Masters as Masters
from diloco.exchange.transport import Channel as Channel
from diloco.exchange.transport import Pending as Pending
from diloco.exchange.transport import Tag as Tag
from diloco.exchange.transport import Transport as Transport
from diloco.files import write_atomically as write_atomically
from diloco.models.language_model import LanguageModel as LanguageModel
from diloco.models.spec import ModelConfig as ModelConfig
from diloco.outer.averages import Average as Average
from diloco.outer.cohort import Cohort as Cohort
from diloco.outer.merge import FlatFP32 as FlatFP32
from diloco.outer.merge import MergeRule as MergeRule
from diloco.outer.merge import Past as Past
from diloco.outer.rule import JSON as JSON
from diloco.outer.rule import FragmentState as FragmentState
from diloco.outer.rule import OuterRule as OuterRule
from diloco.outer.rule import Span as Span
from diloco.schedule import Sync as Sync
from diloco.wire.payload import Codec as Codec
from diloco.wire.payload import Key as Key
