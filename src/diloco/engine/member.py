"""The membership of a replica, by what joins it to the others: a transport, or a rendezvous."""

from collections.abc import Mapping

from torch import Tensor, nn

from diloco.engine.elastic import ElasticMembership
from diloco.engine.fixed import FixedMembership
from diloco.engine.masters import Masters
from diloco.engine.membership import Membership
from diloco.engine.parameters import FragmentParameters
from diloco.engine.settings import Settings
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
    """This replica among those that the exchange joins; every other one is told the settings.

    Raises:
        UserError: if the settings contradict each other, the model or the exchange.
        DisagreementError: if the replicas were given different settings or initial parameters.
    """
    if is_rendezvous(exchange):
        settings.check(model, num_replicas=None)
        settings.check_rendezvous()
        parameters = FragmentParameters(model, settings.fragments, masters)
        return ElasticMembership(settings, exchange, parameters, offload=offload)
    settings.check(model, exchange.num_replicas)
    settings.check_transport(exchange)
    parameters = FragmentParameters(model, settings.fragments, masters)
    return FixedMembership(settings, exchange, parameters, offload=offload)
