"""The routing policies by their names in the settings."""

from services.frontend.engines.prefix_aware import PrefixAware, RoutingWeights
from services.frontend.engines.routing import LeastLoaded, RoundRobin, RoutingPolicy
from services.frontend.settings import FrontendSettings


def routing_policy(settings: FrontendSettings) -> RoutingPolicy:
    """The policy that the settings ask for."""
    if settings.routing == "round_robin":
        return RoundRobin()
    if settings.routing == "least_loaded":
        return LeastLoaded()
    return PrefixAware(
        RoutingWeights(settings.routing_prefix_weight, settings.routing_load_weight, settings.routing_memory_weight)
    )
