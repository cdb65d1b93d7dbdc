"""The config of a run: its sections, and the traits of their fields."""

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from diloco.data.config import DataConfig
from diloco.errors import FileError, UserError
from diloco.files import requiring
from diloco.integrations.trackers import TrackerName
from diloco.models.families import DEFAULT_FAMILY, load_family
from diloco.models.spec import ModelConfig
from diloco.presets import DilocoSettings, Method, out_of_range
from diloco.rendezvous.log.entries import MOST_SHARES
from diloco.schema import converted, flat

with requiring("tyro", extra="train"):
    import tyro
FORMAT = 1
"""Version of a run's directory, which its config.json names."""

_Config = TypeVar("_Config")


def trait(
    *,
    incidental: bool = False,
    own_to_a_replica: bool = False,
    own_with_rendezvous: bool = False,
    may_change_on_resume: bool = False,
    begins_a_phase: bool = False,
    planned: bool = False,
    column: bool = False,
) -> dict[str, Any]:
    """The `metadata` of a config's field; a config of a room above writes the same dict itself.

    Args:
        incidental: no part of the run's identity, since no number depends on it.
        own_to_a_replica: replicas of one run may differ in it.
        own_with_rendezvous: those that come and go may.
        may_change_on_resume: a resumed run is the same run with another value.
        begins_a_phase: a resumed run may have another value, and begins a new phase of its learning-rate schedule.
        planned: `diloco plan` chooses it.
        column: it follows from a column of a sweep's table.
    """
    return {name: value for name, value in locals().items() if value}


def fields_with(kind: type, name: str) -> dict[str, Any]:
    """The fields that have a trait: its value by the field's dotted name, in the order of the fields.

    A config within a config that has the trait as a whole is one field.
    """
    values = dict(_fields_with(kind, name, ""))
    assert values, f"no field of {kind.__name__} has the trait {name!r}"
    return values


def _fields_with(kind: type, name: str, where: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for f in fields(kind):
        hint = hints[f.name]
        if name in f.metadata:
            yield where + f.name, f.metadata[name]
        elif is_dataclass(hint):
            assert isinstance(hint, type), "a config's field has one type"
            for family in (hint, *hint.__subclasses__()):  # a model's own fields stand in the class of its family
                yield from _fields_with(family, name, f"{where}{f.name}.")


def get(config: Any, dotted: str) -> Any:
    """The value of a field, by its dotted name."""
    return functools.reduce(getattr, dotted.split("."), config)


def with_value(config: _Config, dotted: str, value: Any) -> _Config:
    """The config with another value in a field, by its dotted name."""
    name, _, rest = dotted.partition(".")
    inner = with_value(getattr(config, name), rest, value) if rest else value
    return replace(config, **{name: inner})  # pyrefly: ignore[bad-specialization]


def to_json(config: Any) -> Any:
    """The config as a value that `json` writes; a model of another family than the decoder's names its family."""
    if is_dataclass(config):
        values = {f.name: to_json(getattr(config, f.name)) for f in fields(config)}
        return values | _family(config)
    if isinstance(config, tuple):
        return [to_json(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def _family(config: Any) -> dict[str, str]:
    is_other = isinstance(config, ModelConfig) and config.family != DEFAULT_FAMILY
    return {"family": config.family} if is_other else {}


def from_json(kind: type[_Config], values: Any, *, source: str = "config") -> _Config:
    """The config that `to_json` wrote; a field that is absent takes its default.

    Args:
        kind: a config, with a model of any family in its field `model`.
        values: as `json` reads them.
        source: the file that they are from.

    Raises:
        FileError: for a field that the config does not have, or lacks, and for a value of another type or range.
    """
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict):
        raise FileError(f"{source} can't be read: it has no object as model")
    try:
        family = load_family(str(model.get("family", DEFAULT_FAMILY)))
    except UserError as error:
        raise FileError(f"{source} can't be read: {error}", *error.fields) from error
    # The field's own type is the base of all families, which has no fields of theirs.
    of_family = make_dataclass(kind.__name__, [("model", family)], bases=(kind,), frozen=True, kw_only=True)
    sizes = {name: value for name, value in model.items() if name != "family"}
    config: Any = converted(values | {"model": sizes}, of_family, source=source)
    return kind(**{f.name: getattr(config, f.name) for f in fields(kind)})  # pyrefly: ignore[bad-argument-type]


def hyperparameters(config: Any) -> dict[str, str | int | float | bool]:
    """The values of all fields by dotted name, as trackers keep them: what is no number is text."""
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in flat(to_json(config)).items()}
    return {name: v if isinstance(v, str | int | float) else str(v) for name, v in values.items()}


def is_within(name: str, names: Collection[str]) -> bool:
    """True if a dotted name is one of some names, or that of a field in a section of theirs."""
    return any(f"{name}.".startswith(f"{section}.") for section in names)


def differences(one: Any, other: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, by dotted name, with both values."""
    differing: dict[str, tuple[Any, Any]] = {}
    for f in fields(one):
        mine, theirs = getattr(one, f.name), getattr(other, f.name)
        if is_dataclass(mine) and type(mine) is type(theirs):
            differing |= differences(mine, theirs, f"{where}{f.name}.")
        elif mine != theirs:
            differing[where + f.name] = (mine, theirs)
    return differing


def differences_from_defaults(config: Any, where: str = "") -> dict[str, Any]:
    """The fields that differ from their defaults, by dotted name, as JSON values; a field without a default does.

    A digest of them stays the same when a config gains a field. A changed default must be a new field.
    """
    differing: dict[str, Any] = {where + name: value for name, value in _family(config).items()}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            differing |= differences_from_defaults(value, f"{where}{f.name}.")
        elif _is_required(f) or value != f.default:
            differing[where + f.name] = to_json(value)
    return differing


def _is_required(f: "Field[Any]") -> bool:
    return f.default is MISSING and f.default_factory is MISSING


Parameters = Literal["outer", "replica", "average"]
"""Parameters of a run to use: Θ, which the replicas share; replica 0's own; or the mean of all replicas' own."""


InnerOptimizerName = Literal["adamw", "muon", "sgd", "schedule_free"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The inner optimizer and its learning-rate schedule."""

    name: InnerOptimizerName = "adamw"
    """muon moves the matrices of the blocks, and AdamW the others. schedule_free is AdamW, averaged, and has no
    schedule after the warm-up."""
    learning_rate: float = field(default=2e-3, metadata=trait(column=True, begins_a_phase=True))
    """Peak of the learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment; with schedule_free, the average's share in the point where gradients are
    taken."""
    beta2: float = 0.99
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Number that is added to the root of the second moment."""
    momentum: float = 0.95
    """Momentum of muon and sgd."""
    nesterov: bool = True
    """Use Nesterov's form of `momentum`."""
    ns_steps: int = 5
    """Newton-Schulz iterations with which muon orthogonalizes an update."""
    weight_decay: float | None = None
    """Decoupled weight decay λ, per step λ times the learning rate; None is 1/T for a run of T steps."""
    independent_weight_decay: bool = False
    """Multiply the weight decay not by the learning rate, but by its fraction of the peak."""
    warmup_steps: int | None = field(default=None, metadata=trait(begins_a_phase=True))
    """Steps of linear warm-up from 0; None is min(1000, T/10)."""
    schedule: Literal["cosine", "wsd"] = field(default="cosine", metadata=trait(begins_a_phase=True))
    """After the warm-up: a cosine, or wsd (warm-up, stable, decay), which stays at the peak until the decay."""
    decay_fraction: float = field(default=0.2, metadata=trait(begins_a_phase=True))
    """Share of the run's steps, the last ones, in which wsd decays; without effect on cosine."""
    final_fraction: float = field(default=0.05, metadata=trait(begins_a_phase=True))
    """Learning rate at the last step, as a fraction of the peak."""
    start_step: tyro.conf.Suppress[int] = field(default=0, metadata=trait(own_with_rendezvous=True))
    """The step at which the schedule begins: above 0 after a resume that changed it."""
    start_rate: tyro.conf.Suppress[float] = field(default=0.0, metadata=trait(own_with_rendezvous=True))
    """Learning rate at that step, from which the warm-up rises."""
    clip_norm: float = 1.0
    """Norm to which a larger gradient of a replica is scaled down."""
    z_loss: float = 1e-4
    """Weight of (log Z)² in the training loss."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise out_of_range(f"optimizer.{name}", "above 0 and finite", getattr(self, name))
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise out_of_range(f"optimizer.{name}", "at least 0 and below 1", getattr(self, name))
        if not 0 <= self.final_fraction <= 1:
            raise out_of_range("optimizer.final_fraction", "between 0 and 1", self.final_fraction)
        if not 0 < self.decay_fraction <= 1:
            raise out_of_range("optimizer.decay_fraction", "above 0 and at most 1", self.decay_fraction)
        for name in ("weight_decay", "warmup_steps", "z_loss", "start_step", "start_rate"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise out_of_range(f"optimizer.{name}", "at least 0 and finite", getattr(self, name))
        if not 1 <= self.ns_steps < 100:
            raise out_of_range("optimizer.ns_steps", "at least 1 and below 100", self.ns_steps)
        for f in fields(self):
            users = _USERS.get(f.name, (self.name,))
            if self.name not in users and (value := getattr(self, f.name)) != f.default:
                raise UserError(
                    f"optimizer.{f.name}={value} means nothing to optimizer.name={self.name}: leave it out, or "
                    f"take {' or '.join(users)}",
                    *(f"optimizer.{f.name}", "optimizer.name"),
                )

    @property
    def decay_per_rate(self) -> float:
        """The weight decay that torch multiplies by the learning rate."""
        assert self.weight_decay is not None, "the config is resolved"
        return self.weight_decay / self.learning_rate if self.independent_weight_decay else self.weight_decay


_USERS = {
    **dict.fromkeys(("beta1", "beta2", "epsilon"), ("adamw", "muon", "schedule_free")),
    **dict.fromkeys(("momentum", "nesterov"), ("muon", "sgd")),
    "ns_steps": ("muon",),
    **dict.fromkeys(("schedule", "decay_fraction", "final_fraction"), ("adamw", "muon", "sgd")),
}
"""The optimizers that use a setting, where not all do."""


@dataclass(frozen=True, kw_only=True)
class DilocoConfig(DilocoSettings):
    """Outer step and exchange; data_parallel uses none of it."""

    freeze: bool = False
    """Train no parameters but those of the fragment that is sent next (FedPart, arXiv 2410.11559)."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Replicas that come and go: which of their payloads an outer step needs; only with a rendezvous."""

    quorum: Literal["majority", "all"] | int | None = None
    """majority: an outer step waits for all active replicas until t + τ, then for the majority until t + τ +
    patience, and then for nobody. A number: from t + τ on it waits for that many replicas, or for all active ones
    where they are fewer. all: it waits for all, as in a fixed group; a replica can come back only from its
    checkpoint. None is the run's, or majority."""
    patience: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Inner steps after t + τ in which a decision still waits for the majority; None is sync_every."""
    weights: Literal["tokens", "tokens_squared_per_step"] | None = None
    """Weight of a replica's outer gradient in the average; None is the run's, or tokens."""
    max_stale: int | None = None
    """Rounds of a fragment after which a late payload is not counted any more; None is the run's, or 3."""
    num_shares: int | None = None
    """Shares into which reduce_scatter cuts a fragment, each averaged by one replica: about as many as there are
    replicas. None is the run's, or 16."""
    num_slots: int | None = None
    """Parts of the text; each active replica reads one, so that at most this many are active. None is the run's,
    or 64."""
    max_local_steps: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Inner steps without the store, after which this replica stops; None is 50 · sync_every."""
    bridge: str | None = None
    """Name of the process that joins this run, a region, to an outer run (`diloco bridge`); None is the run's, or
    none."""

    def __post_init__(self) -> None:
        bounds = {
            "quorum": (1, 16),
            "patience": (0, 31),
            "max_stale": (0, 31),
            "num_slots": (1, 16),
            "max_local_steps": (1, 31),
        }
        for name, (least, bits) in bounds.items():
            if isinstance(value := getattr(self, name), int) and not least <= value < 1 << bits:
                raise out_of_range(f"elastic.{name}", f"at least {least} and below 2^{bits}", value)
        if self.num_shares is not None and not 2 <= self.num_shares <= MOST_SHARES:
            raise out_of_range("elastic.num_shares", f"from 2 to {MOST_SHARES}", self.num_shares)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints for a resume, on each replica's own disk."""

    every_steps: int = field(default=200, metadata=trait(may_change_on_resume=True))
    """Steps between two checkpoints; 0 saves none."""
    keep: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Number of the newest checkpoints to keep; None is as many as replicas that are apart need, at least 3."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out loss of the outer parameters."""

    every_steps: int = field(default=0, metadata=trait(own_with_rendezvous=True))
    """Steps between two evaluations while training, each replica on its share of the text; 0 is the end only."""
    num_tokens: int = field(default=262_144, metadata=trait(own_with_rendezvous=True))
    """Largest number of held-out tokens to evaluate on."""
    batch: int = field(default=16, metadata=trait(may_change_on_resume=True))
    """Sequences per forward pass."""

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 0), ("num_tokens", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise out_of_range(f"evaluation.{name}", f"at least {least}", getattr(self, name))


_MOST_PROCESSES = 1 << 16
"""Largest number of processes, or of connections: what is counted by them stays small."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The config of a run."""

    recipe: tyro.conf.Suppress[str] = field(default="", metadata=trait(incidental=True))
    """Name of the recipe that made this config."""
    name: str = field(default="", metadata=trait(incidental=True))
    """Name of the run's directory below `runs`; left out, the recipe's name and the time. With a rendezvous also
    the name by which other replicas know this one: a later process of the same name takes its place."""
    runs: Path = field(default=Path("runs"), metadata=trait(incidental=True, own_to_a_replica=True))
    """Directory of all runs."""
    method: Method = field(default="streaming_overlapped_fp4", metadata=trait(planned=True))
    """Preset of the DiLoCo settings that are left out; data_parallel averages gradients at every step instead."""
    num_replicas: int = field(default=2, metadata=trait(column=True))
    """M, number of replicas: local processes, or under torchrun those of its world. With a rendezvous a command
    starts one replica, and training begins once M replicas, by default 1, have joined."""
    rendezvous: str | None = field(default=None, metadata=trait(own_to_a_replica=True, may_change_on_resume=True))
    """Directory or bucket in which replicas that come and go meet: a path, s3://bucket/prefix, gs://…, az://… or
    hf://…. The first command creates the run there. Others join at any time, each as one replica; they name this
    field, `name` and the text, and take all other settings from the run."""
    replica_batch: int | None = field(
        default=None, metadata=trait(own_to_a_replica=True, may_change_on_resume=True)
    )
    """Sequences per step of this replica, all its processes together; only with a rendezvous. None is global_batch
    / num_replicas."""
    shards_per_replica: int = field(default=1, metadata=trait(may_change_on_resume=True))
    """S, processes over which each replica is sharded (FSDP2): S consecutive ranks of M·S; with a rendezvous all
    processes of a command."""
    tensor_parallel: int = field(default=1, metadata=trait(may_change_on_resume=True))
    """T, processes that compute on the same sequences, each with its part of every matrix. S and the model's
    number of heads are multiples of T; FSDP2 shards over S/T."""
    ddp_per_replica: int = field(default=1, metadata=trait(may_change_on_resume=True))
    """D, copies of each replica's parameters, which share its batch: D processes (DistributedDataParallel inside
    the replica), or with shards_per_replica D·S (HSDP)."""
    seed: int = field(default=0, metadata=trait(column=True))
    """Seed of the initial parameters and of the order of the data."""
    num_tokens: int = field(metadata=trait(column=True, begins_a_phase=True))
    """Token budget of the whole run, over all replicas: whole steps of global_batch · sequence_length. The command
    `train` takes 1e6, 1M or 20x (times the parameters), too, and rounds to whole steps."""
    global_batch: int = field(metadata=trait(column=True))
    """Sequences per step over all replicas; a multiple of the number of processes."""
    micro_batch: int | None = field(default=None, metadata=trait(may_change_on_resume=True))
    """Sequences per forward pass of one process; gradients add up over passes. None is its whole share of the
    batch."""
    sequence_length: int
    """Tokens per sequence."""
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig, metadata=trait(own_to_a_replica=True))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig, metadata=trait(own_to_a_replica=True))
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    num_connections: int = field(default=1, metadata=trait(may_change_on_resume=True))
    """TCP connections between two replicas; several fill a long link that loses packets."""
    device: Literal["auto", "cpu", "cuda", "mps"] = field(
        default="auto", metadata=trait(own_to_a_replica=True, may_change_on_resume=True)
    )
    """Device on which the replicas compute: cuda for GPUs of NVIDIA and AMD, mps for Apple's, which no run has
    used yet; auto is cuda where there is such a GPU, else cpu."""
    precision: Literal["auto", "bf16", "fp32", "bf16-params"] = field(
        default="auto", metadata=trait(own_to_a_replica=True)
    )
    """bf16 autocast or fp32; auto is bf16 where the hardware multiplies it faster. bf16-params keeps parameters,
    gradients and the inner optimizer's moments in bfloat16, and the outer parameters and momentum in FP32."""
    compile: bool = field(default=False, metadata=trait(own_to_a_replica=True))
    """Run the model through torch.compile."""
    timeout_seconds: float = field(
        default=600.0, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Seconds to wait for another replica before giving up."""
    trackers: tuple[TrackerName, ...] = field(
        default=("tensorboard",),
        metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True),
    )
    """Trackers to which each replica's curves go, beside its file of metrics."""
    prometheus_port: int | None = field(
        default=None, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Port of 127.0.0.1 on which a machine's first replica serves /metrics for Prometheus; its next replicas take
    the ports after it. None serves nothing."""
    publish: str | None = field(
        default=None, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Directory or bucket in which the outer parameters are published for followers, in bfloat16, while training
    goes on: a path, s3://bucket/prefix, gs://… or az://…. With a rendezvous give it to every replica."""
    publish_every: int = field(
        default=1, metadata=trait(incidental=True, own_to_a_replica=True, may_change_on_resume=True)
    )
    """Rounds of all fragments, or steps with data_parallel, between two published versions; the end has one,
    too."""
    log_layer_cosine: bool = field(default=False, metadata=trait(own_with_rendezvous=True))
    """Log the cosine between replicas' outer gradients for every block, not only for every fragment."""

    def __post_init__(self) -> None:
        """Refuse contradictions; the schedule, codec and fragments check their own."""
        inside = ("shards_per_replica", "tensor_parallel", "ddp_per_replica")
        counted = ("num_replicas", *inside, "num_connections", "publish_every")
        for name in (*counted, "num_tokens", "global_batch", "sequence_length"):
            if getattr(self, name) < 1:
                raise out_of_range(name, "at least 1", getattr(self, name))
        for name in counted:
            if getattr(self, name) > _MOST_PROCESSES:
                raise out_of_range(name, f"at most {_MOST_PROCESSES}", getattr(self, name))
        if self.shards_per_replica % self.tensor_parallel:
            raise UserError(
                f"shards_per_replica={self.shards_per_replica} must be a multiple of tensor_parallel="
                f"{self.tensor_parallel}: it counts all processes over which a replica is cut",
                *("shards_per_replica", "tensor_parallel"),
            )
        self.model.check_tensor_parallel(self.tensor_parallel)
        if self.optimizer.name == "schedule_free" and self.precision == "bf16-params":
            raise UserError(
                "optimizer.name=schedule_free with precision=bf16-params: the average of many steps moves by less "
                "than bfloat16 can tell: take bf16 or fp32",
                *("optimizer.name", "precision"),
            )
        if not 0 <= self.seed < 2**63:
            raise out_of_range("seed", "at least 0 and below 2^63", self.seed)
        if not 0 < self.timeout_seconds <= 1e7:
            raise out_of_range("timeout_seconds", "above 0 and at most 1e7", self.timeout_seconds)
        if self.prometheus_port is not None and not 0 < self.prometheus_port < 1 << 16:
            raise out_of_range("prometheus_port", "above 0 and below 65536", self.prometheus_port)
        if self.method == "data_parallel":
            _check_data_parallel(self)
        _check_rendezvous(self)
        _check_batch(self)
        _check_checkpoints(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all replicas."""
        return self.global_batch * self.sequence_length

    @property
    def processes_per_replica(self) -> int:
        """S · D."""
        return self.shards_per_replica * self.ddp_per_replica

    @property
    def readers_per_replica(self) -> int:
        """The processes of a replica, or groups of processes, that read sequences of their own."""
        return self.processes_per_replica // self.tensor_parallel

    @property
    def num_local_replicas(self) -> int:
        """Replicas that one command starts, and whose files its directory holds: M, with a rendezvous 1."""
        return self.num_replicas if self.rendezvous is None else 1

    @property
    def num_processes(self) -> int:
        """Processes of all of these replicas."""
        return self.num_local_replicas * self.processes_per_replica

    @property
    def process_batch(self) -> int:
        """Sequences per step of one process."""
        return (self.replica_batch or self.global_batch // self.num_replicas) // self.readers_per_replica

    @property
    def replica_tokens(self) -> int:
        """Tokens of one step of this replica."""
        return self.process_batch * self.readers_per_replica * self.sequence_length

    @property
    def step_flops(self) -> float:
        """The model's operations in a step of one process."""
        tokens = self.replica_tokens / self.processes_per_replica
        return self.model.flops_per_token(self.sequence_length) * tokens

    @property
    def num_steps(self) -> int:
        """T.

        Raises:
            UserError: if the budget is no whole number of steps.
        """
        num_steps, rest = divmod(self.num_tokens, self.tokens_per_step)
        if rest:
            below = self.num_tokens - rest
            choice = f"{below} or {below + self.tokens_per_step}" if below else f"{self.tokens_per_step} or more"
            raise UserError(
                f"num_tokens={self.num_tokens} is no whole number of steps of global_batch·sequence_length="
                f"{self.tokens_per_step} tokens: take {choice}",
                *("num_tokens", "global_batch", "sequence_length"),
            )
        return num_steps

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.runs / self.name

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.directory / "checkpoints"

    @property
    def checkpoints_needed(self) -> int:
        """Number of newest checkpoints of each replica that always share one step, however far apart they are."""
        every = self.checkpoint.every_steps
        return 1 if not every or self.num_local_replicas == 1 else 2 - -self.steps_apart // every

    @property
    def default_keep(self) -> int:
        """The value of `checkpoint.keep` where it was left out."""
        return max(3, self.checkpoints_needed)

    @property
    def steps_apart(self) -> int:
        """Largest number of steps by which a replica may be ahead of another."""
        diloco = self.diloco
        if self.method == "data_parallel":
            return 1
        first_offset = min(diloco.offsets) if diloco.offsets and diloco.first_sync == "full_period" else 0
        return diloco.sync_every + first_offset + max(1, diloco.max_overlap)


def _check_data_parallel(config: TrainConfig) -> None:
    if config.num_connections > 1:
        raise UserError(
            f"num_connections={config.num_connections} means nothing to data_parallel, which leaves gradients "
            "to DistributedDataParallel: leave it out",
            "num_connections",
        )
    if config.ddp_per_replica > 1:
        raise UserError(
            f"ddp_per_replica={config.ddp_per_replica} with method=data_parallel, whose replicas are equal "
            "processes already: raise num_replicas instead",
            *("ddp_per_replica", "method", "num_replicas"),
        )


def _check_rendezvous(config: TrainConfig) -> None:
    """Refuse what replicas that come and go can't do, and what only they can."""
    if config.replica_batch is not None and config.replica_batch < 1:
        raise out_of_range("replica_batch", "at least 1", config.replica_batch)
    if config.rendezvous is None:
        for name, value in (("replica_batch", config.replica_batch), *vars(config.elastic).items()):
            if value is not None:
                name = name if name == "replica_batch" else f"elastic.{name}"
                raise UserError(
                    f"{name}={value} means nothing without rendezvous: set it to a URL", name, "rendezvous"
                )
        return
    diloco = config.diloco
    refused = {
        "method": (config.method == "data_parallel", "it needs every replica at every step: take another"),
        "ddp_per_replica": (config.ddp_per_replica > 1, "take shards_per_replica for the processes of a replica"),
        "num_connections": (config.num_connections > 1, "replicas exchange through the store: leave it out"),
        "diloco.freeze": (diloco.freeze, "the order of the sends is not known before: leave it out"),
        "elastic.num_shares": (
            config.elastic.num_shares is not None and diloco.combine == "gather",
            "gather cuts nothing into shares: leave it out, or take diloco.combine=reduce_scatter",
        ),
    }
    for name, (is_set, reason) in refused.items():
        if is_set:
            raise UserError(
                f"{name}={get(config, name)} with rendezvous={config.rendezvous}: {reason}", name, "rendezvous"
            )


def _check_batch(config: TrainConfig) -> None:
    inside = {
        "shards_per_replica": config.shards_per_replica // config.tensor_parallel,
        "ddp_per_replica": config.ddp_per_replica,
    }
    if config.replica_batch is None and config.global_batch % (config.num_replicas * config.readers_per_replica):
        divisor = f"num_replicas={config.num_replicas}"
        for name, number in inside.items():
            if number > 1:
                divisor += f" · {_number_of(config, name)}"
        raise UserError(
            f"global_batch={config.global_batch} must be a multiple of {divisor}: "
            "each process takes an equal share",
            *("global_batch", "num_replicas", *inside),
        )
    if config.replica_batch is not None and config.replica_batch % config.readers_per_replica:
        raise UserError(
            f"replica_batch={config.replica_batch} must be a multiple of "
            f"{_number_of(config, 'shards_per_replica')}: each process takes an equal share",
            *("replica_batch", "shards_per_replica"),
        )
    if config.micro_batch is not None and (config.micro_batch < 1 or config.process_batch % config.micro_batch):
        raise UserError(
            f"micro_batch={config.micro_batch} must divide a process's share of the batch, {config.process_batch}",
            "micro_batch",
        )


def _number_of(config: TrainConfig, name: str) -> str:
    """A setting with its value, and what divides it."""
    is_divided = name == "shards_per_replica" and config.tensor_parallel > 1
    divisor = f" / tensor_parallel={config.tensor_parallel}" if is_divided else ""
    return f"{name}={getattr(config, name)}{divisor}"


def _check_checkpoints(config: TrainConfig) -> None:
    every, keep = config.checkpoint.every_steps, config.checkpoint.keep
    if every < 0:
        raise out_of_range("checkpoint.every_steps", "at least 0", every)
    if keep is not None and keep < 1:
        raise out_of_range("checkpoint.keep", "at least 1", keep)
    if keep is not None and keep < config.checkpoints_needed:
        raise UserError(
            f"checkpoint.keep={keep} with checkpoint.every_steps={every}: replicas may be {config.steps_apart} "
            f"steps apart, so keep at least {config.checkpoints_needed} checkpoints, or save less often",
            *("checkpoint.keep", "checkpoint.every_steps"),
        )
