"""Draft trees as parents arrays: parents[i] < i, and -1 marks a child of the last known token.

the ─┬─ 0 cat ─┬─ 2 sat        tokens  = [cat, dog, sat, ran]
     │         └─ 3 ran        parents = [ -1,  -1,   0,   0]
     └─ 1 dog                  depths  = [  0,   0,   1,   1]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def chain(num_tokens: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, num_tokens - 1))


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == i - 1 for i, parent in enumerate(parents))


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """Children by row, in ascending order: entry 0 belongs to the root, 1 + i to token i."""
    children: list[list[int]] = [[] for _ in range(1 + len(parents))]
    for i, parent in enumerate(parents):
        children[1 + parent].append(i)
    return children


def check_parents(parents: Sequence[int]) -> None:
    """Raises ValueError unless every parent comes before its child."""
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"parents[{i}] is {parent}; a parent comes before its child, and -1 is the root")


def tree_mask(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which tokens a token may attend to: itself and its ancestors, [num_tokens, num_tokens]."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:  # -1 as an index would be the last row
            mask[i] |= mask[parent]
    return mask


def depths(parents: Sequence[int]) -> list[int]:
    """Distance of each token from the root; a child of the root has depth 0."""
    result: list[int] = []
    for parent in parents:
        result.append(result[parent] + 1 if parent >= 0 else 0)
    return result


def height(parents: Sequence[int]) -> int:
    """Tokens on the longest path."""
    return 1 + max(depths(parents), default=-1)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`; empty for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def nodes_along(tokens: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """The nodes that say `path`, from the root on, as far as the tree has it. Siblings are different tokens."""
    children, node, nodes = children_of(parents), -1, []
    for token in path:
        node = next((child for child in children[1 + node] if tokens[child] == token), -1)
        if node < 0:
            break
        nodes.append(node)
    return nodes


def best_nodes(values: Sequence[float], parents: Sequence[int], num_nodes: int) -> list[int]:
    """The `num_nodes` nodes of greatest value, ascending (the second phase of EAGLE-2, arXiv 2406.16858).

    A value is the product of the draft's confidences along the path, so that no child outranks its parent; among equals
    the shallower node is first, then the lower index. So a chosen node's parent is chosen too.
    """
    level = depths(parents)
    order = sorted(range(len(parents)), key=lambda i: (-values[i], level[i], i))
    return sorted(order[:num_nodes])


def best_first_tree(marginals: Sequence[Sequence[tuple[int, float]]], num_nodes: int) -> tuple[list[int], list[int]]:
    """The tree of greatest expected acceptance when each position's law is known beforehand (DDTree, arXiv 2604.12989).

    marginals[d]: (token, probability) of depth d in descending order, the same after every path. Returns tokens [n] and
    parents [n], n <= num_nodes, best path first. O(n log n): a node's successors are its next sibling and first child.
    """
    tokens: list[int] = []
    parents: list[int] = []
    # (-path probability, depth, parent, rank in marginals[depth], the probability of the path to the parent)
    frontier: list[tuple[float, int, int, int, float]] = []

    def push(depth: int, parent: int, rank: int, path_probability: float) -> None:
        if depth < len(marginals) and rank < len(marginals[depth]):
            value = path_probability * marginals[depth][rank][1]
            heapq.heappush(frontier, (-value, depth, parent, rank, path_probability))

    push(0, -1, 0, 1.0)
    while frontier and len(tokens) < num_nodes:
        negative, depth, parent, rank, path_probability = heapq.heappop(frontier)
        node = len(tokens)
        tokens.append(marginals[depth][rank][0])
        parents.append(parent)
        push(depth, parent, rank + 1, path_probability)
        push(depth + 1, node, 0, -negative)
    return tokens, parents
