"""partition_order: know simulated clients by their partition, so that a seed reproduces a run.

Flower gives simulated nodes random ids, anew in each run. A strategy that sorts by node id therefore samples
other partitions, and sums in another order, each time. Clients that answer `get_properties` with
`{"partition-id": int}` can be told apart by that instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from flwr.common import Code, GetPropertiesIns
from flwr.server.client_proxy import ClientProxy

from .options import is_integer
from .updates import one_line

logger = logging.getLogger(__name__)

# Requests wait for the client most of the time; the threads are short-lived.
_THREADS = 64


def partition_order(clients: Sequence[ClientProxy], timeout: float | None = 600.0) -> Mapping[str, int]:
    """Ask each client for its partition id, once.

    Parameters
    ----------
    clients : sequence of ClientProxy
        Clients whose partition is not known yet.
    timeout : float, optional
        Seconds to wait for one client.

    Returns
    -------
    mapping of str to int
        Partition id by `ClientProxy.cid`. A client that does not answer, or answers without a
        `partition-id`, is missing: it sorts after the others, by its id.
    """

    def ask(client: ClientProxy) -> int | None:
        res = client.get_properties(GetPropertiesIns(config={}), timeout=timeout, group_id=None)
        ok = getattr(res.status, "code", None) is Code.OK and isinstance(res.properties, Mapping)
        value = res.properties.get("partition-id") if ok else None
        return value if is_integer(value) else None

    def ask_or_none(client: ClientProxy) -> int | None:
        try:
            return ask(client)
        except Exception as error:  # noqa: BLE001 - an error reply, a timeout, what Flower makes of an odd reply
            reason = one_line(f"{type(error).__name__}: {error}")
            logger.warning("client %s does not say which partition it is: %s", client.cid, reason)
            return None

    with ThreadPoolExecutor(max_workers=min(_THREADS, max(1, len(clients)))) as pool:
        answers = list(pool.map(ask_or_none, clients))
    return {c.cid: a for c, a in zip(clients, answers, strict=True) if a is not None}
