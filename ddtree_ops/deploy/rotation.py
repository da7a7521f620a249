"""A sweep's way around the cards of a cluster: `deploy up --rotate` between repeats.

Position p is rotation p of the layout, counted from the one in which cluster.yaml lays services out. A move
starts all services of the cluster freshly, those that keep their cards included: how fast a service is also
changes from one start to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ddtree_ops.deploy.layout import Card, Replica, lay_out
from ddtree_ops.deploy.lockfile import exclusively, read_lock
from ddtree_ops.deploy.session import ClusterSession
from ddtree_ops.deploy.up import Options, bring_up
from ddtree_ops.errors import BadInput
from ddtree_ops.output import Output
from ddtree_ops.schemas.cluster import Cluster, EngineKind
from ddtree_ops.schemas.results import ReplicaAt
from ddtree_ops.schemas.sweep import Sweep
from ddtree_ops.services.rotation import Rotation, Seats

#: A guess for `--dry-run`: a container stops, another starts, loads its weights and is proved ready.
MOVE_S = {EngineKind.SGLANG: 180.0, EngineKind.REFERENCE: 20.0}

NO_CONTAINER = "there is no container"

Cards = Mapping[str, Sequence[Card]]
Note = Callable[[str], None]


def rotating(
    sweep: Sweep, cluster: Cluster, measured: Iterable[Replica], cards: Cards, *, note: Note
) -> Sweep:
    """The sweep with a repeat for each position: as many as there are places, unless it names them.

    measured  the replicas that it measures
    Raises BadInput for fewer than two positions.
    """
    hosts = sorted({replica.host for replica in measured})
    places = count_places(cluster, hosts, {host: cards.get(host, ()) for host in hosts})
    if "repeats" not in sweep.model_fields_set:
        sweep = sweep.model_copy(update={"repeats": places})
    if sweep.repeats < 2:
        allowed = "2 or more, so that services can be started anew between them"
        raise BadInput.at(file=None, key="repeats", found=sweep.repeats, allowed=allowed)
    if sweep.repeats % places:
        note(f"{sweep.repeats} repeats over {places} places: not every service has every place equally often")
    return sweep


def count_places(cluster: Cluster, hosts: Sequence[str], cards: Cards) -> int:
    """How many turns it takes until every service is back where it began; 1 where none moves."""
    most = max((len(some) for some in cards.values()), default=0)
    first = lay_out(cluster, hosts, cards)
    every = (turn for turn in range(1, most + 1) if lay_out(cluster, hosts, cards, turn=turn) == first)
    return next(every, max(most, 1))


def plan_rotation(
    cluster: Cluster, measured: Mapping[str, Sequence[Replica]], cards: Cards, positions: int
) -> Rotation:
    """Where the measured replicas of each service will be."""
    seats: dict[str, list[Seats]] = {name: [] for name in measured}
    hosts = sorted({replica.host for replicas in measured.values() for replica in replicas})
    for position in range(positions):
        there = {
            (one.service.name, one.host, one.index): one.gpus
            for one in lay_out(cluster, hosts, cards, turn=position)
        }
        for name, replicas in measured.items():
            seats[name].append(
                tuple(
                    seat(one, there[name, one.host, one.index], cards.get(one.host, ()), number=number)
                    for number, one in enumerate(replicas)
                )
            )
    return Rotation({name: tuple(some) for name, some in seats.items()}, MOVE_S[cluster.engine])


def seat(replica: Replica, gpus: Sequence[str], cards: Sequence[Card], *, number: int) -> ReplicaAt:
    """A replica on these GPUs of its host.

    cards   of the host, in the order of their indices; those that are not known have no index
    number  of the replica among all of its service
    """
    index = {card.uuid: position for position, card in enumerate(cards)}
    known = [index[gpu] for gpu in gpus if gpu in index]
    bind = replica.service.bind
    return ReplicaAt(
        number=number,
        host=replica.host,
        endpoint=f"[{bind}]:{replica.port}" if ":" in bind else f"{bind}:{replica.port}",
        gpus=list(gpus),
        cards=known if len(known) == len(gpus) else [],
    )


class ClusterMover:
    """Moves the services of an open cluster, as `ddtree deploy up --rotate N --skip-provisioning` does.

    measured  the replicas of each service of the sweep
    images    the id of its image by service: a move must not bring another one
    """

    def __init__(
        self,
        session: ClusterSession,
        rotation: Rotation,
        measured: Mapping[str, Sequence[Replica]],
        images: Mapping[str, str],
    ) -> None:
        self._session = session
        self._rotation = rotation
        self._measured = dict(measured)
        self._images = dict(images)

    def stands_at(self, position: int) -> bool:
        """Whether the measured containers run in their places of this position. Raises HostUnreachable."""
        if read_lock(self._session.file).turn != position:
            return False
        return all(self._elsewhere(name, position) is None for name in self._measured)

    def move(self, position: int, out: Output) -> dict[str, str]:
        """Restart all services in their places of this position; why a measured one does not serve there.

        Raises BadEnvironment while another `deploy` works on the cluster, JobFailed when no host is left.
        """
        session = self._session
        with exclusively(session.file):
            session.lock = read_lock(session.file)  # who deployed meanwhile may have written it
            session.unreachable.clear()
            session.turn_to(position)
            # The container before would come back to a card that somebody else has now.
            options = Options(provisioning=False, recreate=True, restore=False)
            report = bring_up(session, options, out)
        troubles: dict[str, str] = {}
        for name, replicas in self._measured.items():
            for replica in replicas:
                label = f"{replica.host}/{replica.container(session.cluster.name)}"
                why = report.unreachable.get(replica.host) or report.failed.get(replica.host)
                why = why or report.failed.get(label)
                if why:
                    troubles.setdefault(name, why)
            if name not in troubles and (why := self._elsewhere(name, position)):
                troubles[name] = why
        return troubles

    def _elsewhere(self, name: str, position: int) -> str | None:
        """What is wrong with a place of the service; null where all replicas run in theirs."""
        wanted = self._rotation.seats[name][position]
        checks = (
            self._replica_elsewhere(name, replica, at.place)
            for replica, at in zip(self._measured[name], wanted, strict=True)
        )
        return next((why for why in checks if why is not None), None)

    def _replica_elsewhere(self, name: str, replica: Replica, wanted: str) -> str | None:
        container = replica.container(self._session.cluster.name)
        found = self._session.engine(replica.host).find(container)
        if found is None or not found.running:
            return f"{replica.host}/{container}: {found.outcome if found else NO_CONTAINER}"
        there = ReplicaAt(host=replica.host, gpus=list(found.gpus)).place
        if there != wanted:
            return f"it is at {there}, planned was {wanted}"
        if found.image != self._images[name]:
            return f"its image is {found.image}, that of the sweep's start {self._images[name]}"
        return None
