"""Static trees beside packages of others that build them, where those are installed.

Nothing of theirs is copied: they are called as their users call them, and compared first.
"""

from __future__ import annotations

import random
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.layout import TreeMaskMode, live_mask_numel
from torchvm.ops.tree import build_tree_from_parents
from torchvm.tools.bench.measure import Case, Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["PEERS", "TITLE", "Peer", "StaticTree", "cases", "draw_tree", "missing", "peer_case"]

TITLE = "peers: one static tree laid out; sizes are n"
NOTES = (
    "torchvm: build_tree_from_parents, QLEN_ONLY, its links included",
    "the tree is random, with up to 8 children a node, and its nodes come level by level",
    "EAGLE: generate_tree_buffers, its top-k and retrieve tables included",
    "attention-gym: build_tree_ancestor_matrix, the mask alone",
    "masks must equal a walk in Python, and where there are some positions and leaf paths too",
)
_MOST_CHILDREN = 8


class StaticTree(NamedTuple):
    """A tree with its nodes level by level, as peers sort them."""

    parents: tuple[int, ...]
    """Of each node; -1 of the root."""
    choices: tuple[tuple[int, ...], ...]
    """For each node but the root, which child to take at each level."""

    def walk(self, node: int) -> list[int]:
        """The nodes from the root to this one."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


class Peer(NamedTuple):
    """A package and what of it is called."""

    name: str
    package: str
    """With its version."""
    needs: str
    """What else it imports; it is installed without its dependencies."""
    load: Callable[[], Callable[[StaticTree], Any]]
    """Import it and return what lays out a tree."""
    results: Callable[[Any], dict[str, Any]]
    """Its mask (n, n), and positions (n,) and leaf paths where it has them."""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.package}"


def _load_eagle() -> Callable[[StaticTree], Any]:
    build = import_module("eagle.model.utils").generate_tree_buffers
    return lambda tree: build([list(choice) for choice in tree.choices], device="cpu")


def _eagle_results(found: Any) -> dict[str, Any]:
    paths = [tuple(i for i in row if i >= 0) for row in found["retrieve_indices"].tolist()]
    return {
        "mask": found["tree_attn_mask"][0, 0].bool(),
        "positions": found["tree_position_ids"],
        "paths": sorted(paths),
    }


def _load_attention_gym() -> Callable[[StaticTree], Any]:
    build = import_module("attn_gym.masks.jetspec").build_tree_ancestor_matrix
    return lambda tree: build(tree.parents, device="cpu")


PEERS = (
    Peer(
        "EAGLE", "eagle-llm==1.2.1", "torch and transformers", _load_eagle, _eagle_results
    ),
    Peer(
        "attention-gym", "attn-gym==0.0.17", "torch", _load_attention_gym,
        lambda mask: {"mask": mask},
    ),
)  # fmt: skip


def missing() -> list[str]:
    """A line for every peer that is not there, with how to install it."""
    lines = []
    for peer in PEERS:
        try:
            _load(peer)
        except ImportError as error:
            lines.append(
                f"{peer.name} is left out ({error}): {peer.install} (it needs {peer.needs})"
            )
    return lines


def _load(peer: Peer) -> Callable[[StaticTree], Any]:
    """Import a peer in the version that is compared.

    Raises:
        ImportError: without it, without what it needs, or in another version.
    """
    package, _, version = peer.package.partition("==")
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"{package} is not installed") from error
    if installed != version:
        raise ImportError(f"{package} is {installed}")
    try:
        return peer.load()
    except Exception as error:
        raise ImportError(f"{package} cannot be imported: {error}") from error


def draw_tree(n: int, seed: int) -> StaticTree:
    """Draw a tree of n nodes."""
    rng = random.Random(seed)  # noqa: S311 - no secret.
    choices: list[tuple[int, ...]] = []
    children: dict[tuple[int, ...], int] = {(): 0}
    while len(choices) < n - 1:
        parent = rng.choice([c for c, count in children.items() if count < _MOST_CHILDREN])
        child = (*parent, children[parent])
        children[parent] += 1
        children[child] = 0
        choices.append(child)
    choices.sort(key=lambda choice: (len(choice), choice))
    node_of: dict[tuple[int, ...], int] = {(): 0} | {
        choice: node for node, choice in enumerate(choices, 1)
    }
    return StaticTree((-1, *(node_of[choice[:-1]] for choice in choices)), tuple(choices))


def cases(sizes: tuple[int, ...] = (4, 16, 64)) -> Iterator[Case]:
    """Every size, with the peers that are there."""
    for n in sizes:
        yield peer_case(draw_tree(n, seed=n))


QUICK = (6,)


def peer_case(tree: StaticTree) -> Case:
    """Compare masks, positions and leaf paths, and time each."""
    n = len(tree.parents)
    mask = torch.zeros(int(live_mask_numel(TreeMaskMode.QLEN_ONLY, 1, n)), dtype=torch.bool)
    seq_lens = torch.zeros(1, dtype=torch.int64)

    def ours() -> Any:
        return build_tree_from_parents(
            torch.tensor([tree.parents]), seq_lens, mask,
            num_draft_tokens=n, tree_mask_mode=TreeMaskMode.QLEN_ONLY,
        )  # fmt: skip

    def our_results() -> dict[str, Any]:
        built = ours()
        links = (built.retrieve_next_token[0].tolist(), built.retrieve_next_sibling[0].tolist())
        return {
            "mask": mask.view(n, n).clone(),
            "positions": built.positions,
            "paths": sorted(_leaf_paths(*links)),
        }

    contenders = [Contender("torchvm", ours, our_results)]
    for peer in PEERS:
        try:
            build = _load(peer)
        except ImportError:
            continue
        contenders.append(
            Contender(
                peer.name,
                lambda build=build: build(tree),  # type: ignore[misc]
                lambda build=build, peer=peer: peer.results(build(tree)),  # type: ignore[misc]
            )
        )
    expected = _expected(tree)
    return Case(
        "static tree", str(n), tuple(contenders), lambda: expected, "a walk in Python", _agree
    )


def _agree(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether everything that a peer tells is right."""
    return "mask" in actual and all(
        torch.equal(value, expected[key])
        if isinstance(value, torch.Tensor)
        else value == expected[key]
        for key, value in actual.items()
    )


def _expected(tree: StaticTree) -> dict[str, Any]:
    n = len(tree.parents)
    walks = [tree.walk(node) for node in range(n)]
    mask: Tensor = torch.zeros(n, n, dtype=torch.bool)
    for node, walk in enumerate(walks):
        mask[node, walk] = True
    leaves = set(range(n)) - set(tree.parents)
    return {
        "mask": mask,
        "positions": torch.tensor([len(walk) - 1 for walk in walks]),
        "paths": sorted(tuple(walks[leaf]) for leaf in leaves),
    }


def _leaf_paths(token: list[int], sibling: list[int]) -> Iterator[tuple[int, ...]]:
    """Paths from the root to each leaf, along the links."""
    pending: list[tuple[int, ...]] = [(0,)]
    while pending:
        path = pending.pop()
        child = token[path[-1]]
        if child < 0:
            yield path
        while child >= 0:
            pending.append((*path, child))
            child = sibling[child]
