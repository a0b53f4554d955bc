"""The trees of hosts: shallow, narrow, without circles, whoever comes and goes."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.parameter_server.sharing import ROOT, STRIPES, Tree

HOSTS = [1, 2, 3, 6, 16, 64, 512]


def edges(tree):
    """(stripe, parent, node) of all trees; the root is the empty name."""
    return [
        (stripe, way[0] if way else ROOT, name) for name in tree.nodes for stripe, way in enumerate(tree.ways_up(name))
    ]


def below(tree):
    """How many are below each node and the root, over all trees."""
    return Counter(parent for _, parent, _ in edges(tree))


def grown(hosts, stripes=STRIPES):
    tree = Tree(stripes)
    for index in range(hosts):
        tree.join(f"r/{index}")
    return tree


def test_the_first_hosts_are_below_the_root_and_the_next_below_those_whose_home_the_stripe_is():
    tree = Tree(2)
    assert {name: tree.join(name) for name in "abcdef"} == {
        "a": [[], []],
        "b": [["a"], []],
        "c": [["a"], ["b"]],
        "d": [["c", "a"], ["b"]],
        "e": [["a"], ["d", "b"]],
        "f": [["c", "a"], ["b"]],
    }


def test_one_stripe_is_a_binary_tree():
    tree = Tree(1)
    assert [tree.join(name) for name in "abcdefg"] == [[[]], [[]], [["a"]], [["a"]], [["b"]], [["b"]], [["c", "a"]]]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("stripes", [1, 2, 4])
def test_nobody_sends_much_more_than_a_version(hosts, stripes):
    assert max(below(grown(hosts, stripes)).values()) <= stripes + 1


@pytest.mark.parametrize("hosts", HOSTS)
def test_each_node_hands_on_one_stripe_alone(hosts):
    handed = {(parent, stripe) for stripe, parent, _ in edges(grown(hosts)) if parent != ROOT}
    assert max(Counter(parent for parent, _ in handed).values(), default=1) == 1


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_depth_grows_with_the_logarithm(hosts):
    tree = grown(hosts)
    deepest = max(len(way) + 1 for name in tree.nodes for way in tree.ways_up(name))
    assert deepest <= math.log2(hosts) + 1


@pytest.mark.parametrize("gone", range(12))
def test_who_is_below_a_node_that_leaves_is_below_its_parent(gone):
    tree = grown(12)
    ways = {name: tree.ways_up(name) for name in tree.nodes}
    tree.leave(f"r/{gone}")
    tree.leave("unknown")
    for name in tree.nodes:
        assert tree.ways_up(name) == [[each for each in way if each != f"r/{gone}"] for way in ways[name]]


def test_who_comes_after_one_that_has_left_hands_on_the_same_stripe():
    tree = grown(6)
    tree.leave("r/0")
    tree.join("r/0")
    ways = [tree.join(f"r/{index}") for index in range(6, 12)]
    assert any("r/0" in way for way, _ in ways)
    assert not any("r/0" in way for _, way in ways)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefghijklmnop")), max_size=60),
)
def test_whoever_comes_and_goes_all_ways_lead_to_the_root_and_no_join_makes_a_node_too_wide(stripes, steps):
    tree, there = Tree(stripes), set()
    for joins, name in steps:
        if joins:
            tree.leave(name)
            before = below(tree)
            ways = tree.join(name)
            there.add(name)
            assert len(ways) == stripes
            for way in ways:
                assert name not in way
                assert len(way) == len(set(way))
                assert set(way) <= there
            after = below(tree)
            assert all(count <= max(stripes + 1, before[parent]) for parent, count in after.items())
        else:
            tree.leave(name)
            there.discard(name)
        assert set(tree.nodes) == there
        assert all(set(way) <= there - {name} for name in there for way in tree.ways_up(name))
