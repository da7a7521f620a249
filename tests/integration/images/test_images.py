"""Images with real engines: built once, carried on, found again, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddtree_ops.containers.connection import HostLink
from ddtree_ops.containers.failures import DockerFailure
from ddtree_ops.containers.spec import ContainerSpec
from ddtree_ops.errors import JobFailed
from ddtree_ops.images.base import WantedBase
from ddtree_ops.images.build import Wanted, ensure, planned, remove_images, repository
from ddtree_ops.images.context import LABEL_CONTEXT, LABEL_IMAGE, Base, Recipe
from ddtree_ops.images.events import ImageEvent, Step
from ddtree_ops.images.lock import load_lock
from tests.support.docker import IMAGE
from tests.support.registry import serve_image

pytestmark = [pytest.mark.docker, pytest.mark.root]

DOCKERFILE = """
ARG BASE
FROM ${BASE}
LABEL ddtree.image="engine"
COPY words.txt /words.txt
RUN cat /words.txt
"""
Links = Mapping[str, HostLink]
#: A host that builds takes steps; one that has the image takes none of these.
WORK = {Step.BUILD, Step.SHIP, Step.PACKAGES, Step.CLEAN}


class Story:
    """One cluster's image over several calls, with what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[ImageEvent] = []
        self.base = WantedBase(IMAGE)
        self.dockerfile = DOCKERFILE
        self.words = b"hello"
        self.on_event: Callable[[ImageEvent], None] = self.events.append

    @property
    def wanted(self) -> Wanted:
        return Wanted(repository("lab", "engine"), self.base, self.recipe)

    def recipe(self, base: Base) -> Recipe:
        return Recipe("engine", base, None, self.dockerfile, files={"words.txt": self.words})

    def ensure(self, links: Links, deadline_s: float = 300.0):
        self.events.clear()
        return ensure(
            self.wanted,
            links,
            folder=self.folder,
            on_event=self.on_event,
            deadline_s=deadline_s,
            network="none",
            cache=self.folder,
        )

    def planned(self, links: Links) -> dict[str, str]:
        return planned(self.wanted, links, self.folder)

    def steps(self, host: str) -> set[Step]:
        return {event.step for event in self.events if event.host == host}


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def ours(link: HostLink) -> list[tuple[str, ...]]:
    return sorted(image.tags for image in link.engine().images(LABEL_IMAGE))


def test_built_on_the_first_host_carried_to_the_second_and_then_left_alone(
    story: Story, links: Links
) -> None:
    assert story.planned(links) == {"gpu-a": "would build", "gpu-b": "would ship"}
    built = story.ensure(links)
    assert built["gpu-a"].id == built["gpu-b"].id
    assert any("hello" in event.text for event in story.events if event.step is Step.BUILD)
    assert Step.BUILD not in story.steps("gpu-b")
    sent = [event for event in story.events if event.step is Step.SHIP]
    assert {event.host for event in sent} == {"gpu-b"}
    assert sent[-1].done == sent[-1].total
    assert sent[-1].done is not None
    assert sent[-1].done > 100_000
    for host, link in links.items():
        image = link.engine().image(built[host].tag)
        assert image is not None
        assert image.id == built[host].id
        assert image.labels[LABEL_CONTEXT][:12] == built[host].tag.rpartition(":")[2]

    lock = (story.folder / "images.lock.json").read_bytes()
    assert story.planned(links) == {host: f"present {image.id}" for host, image in built.items()}
    assert story.ensure(links) == built
    assert not WORK & {event.step for event in story.events}
    assert (story.folder / "images.lock.json").read_bytes() == lock
    assert load_lock(story.folder).images[0].id == built["gpu-a"].id


def test_what_was_carried_runs(story: Story, links: Links) -> None:
    built = story.ensure(links)
    spec = ContainerSpec(
        "lab-words-0", "lab", "words", 0, built["gpu-b"].id, ("/bin/cat", "/words.txt"), network="none"
    )
    done = links["gpu-b"].engine().run_once(spec, timeout_s=120)
    assert (done.exit_code, done.output.strip()) == (0, "hello")


def test_a_change_is_another_image_and_the_earlier_one_stays_for_a_rollback(
    story: Story, links: Links
) -> None:
    first = story.ensure(links)
    story.words = b"other"
    second = story.ensure(links)
    assert first["gpu-a"].tag != second["gpu-a"].tag
    assert ours(links["gpu-a"]) == sorted([(first["gpu-a"].tag,), (second["gpu-a"].tag,)])
    story.words = b"hello"
    assert story.ensure(links) == first
    assert not WORK & {event.step for event in story.events}


def test_a_host_that_joins_gets_the_image_from_one_that_has_it(story: Story, links: Links) -> None:
    only = story.ensure({"gpu-b": links["gpu-b"]})
    assert story.planned(links) == {"gpu-a": "would ship", "gpu-b": f"present {only['gpu-b'].id}"}
    both = story.ensure(links)
    assert both["gpu-a"].id == only["gpu-b"].id
    assert Step.BUILD not in {event.step for event in story.events}
    assert story.steps("gpu-a") >= {Step.SHIP}


def test_a_build_that_fails_says_how_it_ended_and_leaves_nothing(story: Story, links: Links) -> None:
    before = load_lock(story.folder)
    story.dockerfile = f"{DOCKERFILE}RUN echo no such luck && false\n"
    with pytest.raises(DockerFailure, match="no such luck"):
        story.ensure(links)
    assert ours(links["gpu-a"]) == []
    assert Step.CLEAN in story.steps("gpu-a")
    assert load_lock(story.folder) == before


def test_ctrl_c_in_a_build_leaves_nothing(story: Story, links: Links) -> None:
    def interrupt(event: ImageEvent) -> None:
        if "RUN cat" in event.text:
            raise KeyboardInterrupt

    story.on_event = interrupt
    with pytest.raises(KeyboardInterrupt):
        story.ensure(links)
    story.on_event = story.events.append
    story.ensure(links)  # the engine ends a build that nobody listens to at its next step
    assert [tags for tags in ours(links["gpu-a"]) if not tags] == []


def test_a_base_that_no_registry_has_is_pinned_by_its_id(story: Story, links: Links) -> None:
    identity = story.ensure({"gpu-a": links["gpu-a"]})["gpu-a"].base_digest
    here = links["gpu-b"].engine().image(IMAGE)
    assert here is not None
    assert here.id != identity, "the engines' bases are two imports"
    story.words = b"other"
    with pytest.raises(DockerFailure, match="is not there, and no registry has") as caught:
        story.ensure({"gpu-b": links["gpu-b"]})
    assert caught.value.remedy is not None
    assert "docker load" in caught.value.remedy
    both = {host: links[host] for host in ("gpu-b", "gpu-a")}
    story.ensure(both)
    assert Step.BUILD in story.steps("gpu-a"), "the host that has the base builds"
    assert Step.SHIP in story.steps("gpu-b")


def test_a_base_is_pulled_by_tag_once_and_then_by_the_digest_of_the_lock_file(
    story: Story, links: Links
) -> None:
    with serve_image(links["gpu-a"].engine().save(IMAGE)) as registry:
        story.base = WantedBase(registry.reference)
        assert story.planned(links) == {"gpu-a": "would build", "gpu-b": "would ship"}
        assert registry.asked == [], "a plan pulls nothing"
        built = story.ensure({"gpu-a": links["gpu-a"]})
        assert built["gpu-a"].base_digest == registry.digest
        locked = {base.name: base for base in load_lock(story.folder).bases}[registry.reference]
        assert (locked.digest, locked.id) == (registry.digest, None)

        registry.asked.clear()
        story.words = b"other"
        story.ensure({"gpu-b": links["gpu-b"]})
        assert any(path.endswith(f"/manifests/{registry.digest}") for path in registry.asked)
        assert not any(path.endswith("/manifests/1") for path in registry.asked)


def test_a_registry_that_does_not_answer_is_a_failure_with_a_remedy(story: Story, links: Links) -> None:
    story.base = WantedBase("127.0.0.1:9/base:1")
    with pytest.raises(DockerFailure) as caught:
        story.ensure(links)
    assert caught.value.remedy


def test_a_deadline_ends_a_build_and_names_the_knob(story: Story, links: Links) -> None:
    story.dockerfile = f"{DOCKERFILE}RUN sleep 500\n"
    with pytest.raises((DockerFailure, JobFailed)):
        story.ensure(links, deadline_s=4.0)
    now = iter((0.0, 100.0))
    with pytest.raises(JobFailed, match="not done after 60 s") as caught:
        ensure(
            story.wanted,
            links,
            folder=story.folder,
            deadline_s=60.0,
            cache=story.folder,
            clock=lambda: next(now),
        )
    assert caught.value.remedy is not None
    assert "deadlines.build" in caught.value.remedy


def test_removal_takes_the_clusters_images_and_nothing_else(story: Story, links: Links) -> None:
    kept = story.ensure(links)["gpu-a"]
    story.words = b"other"
    gone = story.ensure(links)["gpu-a"]
    engine = links["gpu-a"].engine()
    engine.tag(kept.id, "ddtree/laboratory-engine:1")
    engine.tag(gone.id, "somebody/elses:1")
    assert remove_images("lab", links, keep={kept.id}) == {"gpu-a": [gone.tag], "gpu-b": [gone.tag]}
    assert ours(links["gpu-a"]) == [
        ("ddtree/lab-engine:" + kept.tag[-12:], "ddtree/laboratory-engine:1"),
        ("somebody/elses:1",),
    ]
    assert engine.image(IMAGE) is not None
    remove_images("lab", links)
    assert ours(links["gpu-b"]) == []


def test_an_image_that_a_container_uses_stays(story: Story, links: Links) -> None:
    built = story.ensure({"gpu-a": links["gpu-a"]})["gpu-a"]
    engine = links["gpu-a"].engine()
    spec = ContainerSpec("lab-ar-0", "lab", "ar", 0, built.id, ("/bin/sleep", "9"), network="none")
    engine.create(spec)
    try:
        assert remove_images("lab", {"gpu-a": links["gpu-a"]}) == {"gpu-a": []}
        assert engine.image(built.id) is not None
    finally:
        engine.remove("lab-ar-0", log_folder=story.folder)
