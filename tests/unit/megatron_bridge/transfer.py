"""Runs a whole plan in this process, in the plan's own order."""

from megarl.ddma.transports.loopback import LoopbackHub, LoopbackTransport
from megatron_bridge.plan import TransferPlan
from tests.unit.megatron_bridge.checkpoints import Tensors


def execute(plan: TransferPlan, ranks: dict[int, Tensors]) -> None:
    """Fill the target ranks' tensors from the source ranks'."""
    hub = LoopbackHub(len(ranks), timeout_seconds=0.1)
    transports = {rank: LoopbackTransport(hub, rank) for rank in ranks}
    ordered = {}
    for rank, transport in transports.items():
        messages = plan.messages(rank)
        transport.register(ranks[rank], messages)
        transport.begin()
        ordered |= {message.key: message for message in messages}
    for _, message in sorted(ordered.items()):
        transports[message.source_rank].post([message])
        if message.target_rank != message.source_rank:
            transports[message.target_rank].post([message])
        transports[message.target_rank].wait()
