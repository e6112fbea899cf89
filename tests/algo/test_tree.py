from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foredraft.algo.tree import (
    best_first_tree,
    best_nodes,
    chain,
    check_parents,
    children_of,
    depths,
    height,
    is_chain,
    nodes_along,
    path_to,
    tree_mask,
)

PARENTS = [-1, -1, 0, 0, 3, 1]


def test_mask_shows_ancestors_only():
    assert tree_mask(PARENTS).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [0, 1, 0, 0, 0, 1],
    ]
    assert np.array_equal(tree_mask(chain(4)), np.tri(4, dtype=bool))
    assert tree_mask([]).shape == (0, 0)


def test_depths_and_paths():
    assert depths(PARENTS) == [0, 0, 1, 1, 2, 1] == (tree_mask(PARENTS).sum(axis=1) - 1).tolist()
    assert path_to(PARENTS, 4) == [0, 3, 4]
    assert path_to(PARENTS, -1) == []


def test_nodes_along_a_path():
    tokens = [7, 8, 9, 8, 7, 7]  # of PARENTS
    for node in range(len(tokens)):
        path = path_to(PARENTS, node)
        assert nodes_along(tokens, PARENTS, [tokens[i] for i in path]) == path
    assert nodes_along(tokens, PARENTS, [7, 5]) == [0]
    assert nodes_along(tokens, PARENTS, []) == nodes_along([], [], [7]) == []
    assert height(PARENTS) == 3
    assert height([]) == 0


def test_children():
    assert children_of(PARENTS) == [[0, 1], [2, 3], [5], [], [4], [], []]
    for wrong in ([0], [-1, 1], [-2], [-1, 5]):
        with pytest.raises(ValueError, match="a parent comes before its child"):
            check_parents(wrong)


def test_chains():
    assert chain(3) == (-1, 0, 1)
    assert is_chain(chain(3))
    assert is_chain([])
    assert not is_chain([-1, -1])


def test_best_nodes_prefer_the_shallow_and_keep_parents():
    values = [0.5, 0.5, 0.5, 0.1, 0.1, 0.3]
    assert best_nodes(values, PARENTS, 3) == [0, 1, 2]
    assert best_nodes(values, PARENTS, 2) == [0, 1]
    assert best_nodes(values, PARENTS, 5) == [0, 1, 2, 3, 5]
    assert best_nodes(values, PARENTS, 99) == list(range(6))


def test_best_first_tree_is_the_best_of_all_trees():
    """Against every node set that is closed under parents and siblings before: the n greatest path probabilities."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        marginals = []
        for _ in range(3):
            law = np.sort(rng.dirichlet(np.ones(3)))[::-1]
            marginals.append(list(zip(rng.permutation(9)[:3].tolist(), law.tolist(), strict=True)))
        values = [
            float(np.prod([marginals[d][rank][1] for d, rank in enumerate(path)]))
            for depth in (1, 2, 3)
            for path in product(range(3), repeat=depth)
        ]
        for num_nodes in (1, 4, 10, 39, 50):
            tokens, parents = best_first_tree(marginals, num_nodes)
            assert len(tokens) == len(parents) == min(num_nodes, 39)
            level = depths(parents)
            probability = [dict(marginals[level[i]])[tokens[i]] for i in range(len(tokens))]
            value = [np.prod([probability[j] for j in path_to(parents, i)]) for i in range(len(tokens))]
            assert sum(value) == pytest.approx(sum(sorted(values)[-num_nodes:]))
            assert value == sorted(value, reverse=True)
            assert all(len({tokens[c] for c in kids}) == len(kids) for kids in children_of(parents))
    assert best_first_tree([], 4) == ([], [])
