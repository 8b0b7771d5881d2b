"""What a plan costs: predicted seconds beside the floors, and the forwarding that costs least.

Called by planning tools and by whoever chooses a policy for a run; no torch. The model: a transfer
takes as long as its busiest link, each rank handles its messages one after another, the first
message must be packed before and the last unpacked after all links, and a ring must fill.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from megatron_bridge.cluster import Cluster
from megatron_bridge.flows import Forwarding
from megatron_bridge.plan import Load, PlanPolicy, TransferPlan, plan
from megatron_bridge.side import Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Seconds below which no transfer can be, at the NICs' full rate, all ranks on hosts apart."""

    receiver: float  # the busiest receiver's bytes
    sender_unicast: float  # every replica's copy, spread evenly over the senders
    sender_multicast: float  # one copy, spread evenly over the senders

    @property
    def seconds(self) -> float:
        return max(self.receiver, self.sender_multicast)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of one transfer and the parts that decide: the largest of the first three, and all
    of the rest."""

    nic_seconds: float  # busiest NIC
    local_seconds: float  # busiest link between ranks of a host
    host_seconds: float  # busiest host: its memory, and copies where its cores do them
    message_seconds: float  # the rank with the most messages
    pack_seconds: float  # first message into, last out of its staging memory
    fill_seconds: float  # until the last generator has something to pass on
    sync_seconds: float

    @property
    def seconds(self) -> float:
        links = max(self.nic_seconds, self.local_seconds, self.host_seconds)
        rest = self.message_seconds + self.pack_seconds + self.fill_seconds
        return links + rest + self.sync_seconds


def floors(transfer: TransferPlan, cluster: Cluster) -> Floors:
    """Return the floors of any transfer between the two sides."""
    copies: dict[int, int] = defaultdict(int)
    unicast = once = 0
    for route in transfer.routes:
        once += route.nbytes
        unicast += route.nbytes * len(route.targets)
        for rank in route.targets:
            copies[rank] += route.nbytes
    rate = cluster.nic_bytes_per_second * cluster.nics_per_host / cluster.ranks_per_host
    senders = len(transfer.source.ranks) * rate
    return Floors(
        receiver=max(copies.values()) / rate,
        sender_unicast=unicast / senders,
        sender_multicast=once / senders,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoads:
    """Bytes by link."""

    nics: dict[tuple[int, int, str], int]  # (host, NIC, direction) -> what leaves or enters a host
    local: dict[tuple[int, str], int]  # (rank, direction) -> what stays in a host
    hosts: dict[int, int]  # what stays in each host
    copied: dict[int, int]  # what the ranks of each host send and receive


def link_loads(load: Load, cluster: Cluster) -> LinkLoads:
    """Return which links carry what; global ranks fill the hosts in order."""
    seats = cluster.seats(1 + max(load.sent))
    nics: dict[tuple[int, int, str], int] = defaultdict(int)
    local: dict[tuple[int, str], int] = defaultdict(int)
    hosts: dict[int, int] = defaultdict(int)
    copied: dict[int, int] = defaultdict(int)
    for (source, target), nbytes in load.pairs.items():
        copied[seats[source][0]] += nbytes
        copied[seats[target][0]] += nbytes
        if seats[source][0] == seats[target][0]:
            local[source, "out"] += nbytes
            local[target, "in"] += nbytes
            hosts[seats[source][0]] += nbytes
        else:
            nics[(*seats[source], "out")] += nbytes
            nics[(*seats[target], "in")] += nbytes
    return LinkLoads(nics=nics, local=local, hosts=hosts, copied=copied)


def _host_seconds(loads: LinkLoads, cluster: Cluster) -> float:
    """Return the busiest host's seconds; copies and links share its cores, so both add up."""
    memory, packing = cluster.host_bytes_per_second, cluster.pack_bytes_per_second
    longest = 0.0
    for host, copied in loads.copied.items():
        seconds = loads.hosts.get(host, 0) / memory if memory else 0.0
        if packing and cluster.cores_per_host:
            seconds += copied / (packing * cluster.cores_per_host)
        longest = max(longest, seconds)
    return longest


def predict(transfer: TransferPlan, load: Load, cluster: Cluster) -> Prediction:
    """Return the seconds of one transfer."""
    loads = link_loads(load, cluster)
    rate = cluster.nic_bytes_per_second * cluster.nic_efficiency
    packing = cluster.pack_bytes_per_second
    largest = min(transfer.policy.message_bytes, max(load.received.values()))
    return Prediction(
        nic_seconds=max(loads.nics.values(), default=0) / rate,
        local_seconds=max(loads.local.values(), default=0) / cluster.local_bytes_per_second,
        host_seconds=_host_seconds(loads, cluster),
        message_seconds=_most_messages(transfer) * cluster.message_seconds,
        pack_seconds=2 * largest / packing if packing else 0.0,
        fill_seconds=_fill_bytes(transfer)
        / (rate if loads.nics else cluster.local_bytes_per_second),
        sync_seconds=cluster.sync_seconds,
    )


def _fill_bytes(transfer: TransferPlan) -> int:
    """Return what passes one link before all links are busy: a message for each hop but the first."""
    policy = transfer.policy
    hops = 0
    for route in transfer.routes:
        if transfer.is_forwarded(route):
            ring = policy.forwarding is Forwarding.RING
            pieces = len(transfer.pieces(route, 0, route.nbytes))
            message = -(-route.nbytes // max(pieces, len(route.targets)))
            hops = max(hops, message * (len(route.targets) - 1 if ring else 1))
    return hops


def _most_messages(transfer: TransferPlan) -> int:
    """Return about how many messages the busiest rank takes part in."""
    counts: dict[int, float] = defaultdict(float)
    for route in transfer.routes:
        pieces = len(transfer.pieces(route, 0, route.nbytes))
        sent, received = pieces * len(route.targets), pieces
        if transfer.is_forwarded(route):
            # Each piece of the line arrives once and, but for a last hop, leaves once.
            pieces = max(pieces, len(route.targets))
            sent, received = pieces, 2 * pieces
        for rank in route.targets:
            counts[rank] += received
        for rank in route.sources:
            counts[rank] += sent / len(route.sources)
    return round(max(counts.values(), default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costed:
    """A plan, what it loads and what that costs."""

    plan: TransferPlan
    load: Load
    prediction: Prediction


def costed_plans(
    source: Side, target: Side, policy: PlanPolicy, cluster: Cluster
) -> dict[Forwarding, Costed]:
    """Return the plan of each forwarding that the two sides allow, of ``policy`` otherwise.

    Raises:
        PlanError: there is no plan even without forwarding.
    """
    direct = plan(source, target, replace(policy, forwarding=Forwarding.NONE))
    found: dict[Forwarding, Costed] = {}
    for forwarding in Forwarding:
        if forwarding is not Forwarding.NONE and direct.unforwardable:
            continue
        whole = direct.with_forwarding(forwarding)
        load = whole.load()
        found[forwarding] = Costed(plan=whole, load=load, prediction=predict(whole, load, cluster))
    return found


def cheapest(found: dict[Forwarding, Costed]) -> Forwarding:
    """Return the forwarding predicted to cost least; of about equals the simplest."""
    best = Forwarding.NONE
    for forwarding, candidate in found.items():
        if candidate.prediction.seconds < 0.98 * found[best].prediction.seconds:
            best = forwarding
    return best


def choose_plan(source: Side, target: Side, policy: PlanPolicy, cluster: Cluster) -> TransferPlan:
    """Return the plan whose forwarding is predicted to cost least."""
    found = costed_plans(source, target, policy, cluster)
    return found[cheapest(found)].plan
