"""The membership of a replica, by what joins it to the others: a transport, or a rendezvous."""

from collections.abc import Mapping

from torch import Tensor, nn

from diloco.engine.elastic import ElasticMembership
from diloco.engine.elastic_shards import FollowingMembership, LeadingMembership
from diloco.engine.fixed import FixedMembership
from diloco.engine.gathered import GatheredParameters
from diloco.engine.masters import Masters
from diloco.engine.membership import Membership
from diloco.engine.parameters import FragmentParameters
from diloco.engine.settings import Settings
from diloco.engine.sharded import is_sharded
from diloco.exchange.transport import Transport
from diloco.rendezvous.contract import Rendezvous, is_rendezvous


def member(
    settings: Settings,
    exchange: Transport | Rendezvous,
    model: nn.Module,
    masters: Masters | Mapping[str, Tensor] | None,
    *,
    offload: bool,
) -> Membership:
    """This replica among those that the exchange joins, with which it compares the settings.

    Raises:
        UserError: if the settings contradict each other, the model or the exchange.
        DisagreementError: if the replicas were given different settings or initial parameters.
    """
    if is_rendezvous(exchange):
        settings.check(model, num_replicas=None)
        settings.check_rendezvous()
        return _elastic(settings, exchange, model, masters, offload=offload)
    settings.check(model, exchange.num_replicas)
    settings.check_transport(exchange)
    parameters = FragmentParameters(model, settings.fragments, masters)
    return FixedMembership(settings, exchange, parameters, offload=offload)


def _elastic(
    settings: Settings,
    rendezvous: Rendezvous,
    model: nn.Module,
    masters: Masters | Mapping[str, Tensor] | None,
    *,
    offload: bool,
) -> Membership:
    """This replica among others that come and go, or this process's part in it where the model is sharded."""
    if not any(is_sharded(parameter) for parameter in model.parameters() if parameter.requires_grad):
        parameters = FragmentParameters(model, settings.fragments, masters)
        return ElasticMembership(settings, rendezvous, parameters, offload=offload)
    # The first process may wait for other replicas before it is done with a step.
    seconds = 3 * rendezvous.timeout_seconds
    gathered = GatheredParameters(model, settings.fragments, masters, timeout_seconds=seconds)
    if gathered.inside.is_first:
        return LeadingMembership(settings, rendezvous, gathered)
    return FollowingMembership(settings, gathered)
