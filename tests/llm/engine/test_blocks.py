import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.llm.engine.blocks import BlockManager, digest


def names(*tokens: int) -> list[bytes]:
    found = []
    for token in tokens:
        found.append(digest(found[-1] if found else b"", [token]))
    return found


def known(blocks: BlockManager, names: list[bytes]) -> list[int]:
    """The cached blocks of the longest known beginning."""
    return list(itertools.takewhile(bool, map(blocks.find, names)))


def test_a_block_is_named_by_all_that_precedes_it():
    assert names(1, 2)[1] != names(3, 2)[1]
    assert names(1, 2) == names(1, 2)
    assert digest(b"", [1, 2]) != digest(b"", [2, 1])


def test_the_longest_known_beginning_is_found_and_shared():
    blocks = BlockManager(5)
    mine = blocks.take(3)
    for block, name in zip(mine, names(7, 8, 9), strict=True):
        blocks.publish(block, name)
    assert known(blocks, names(7, 8, 1)) == mine[:2]
    assert known(blocks, names(8)) == []
    blocks.share(mine[:2])
    blocks.release(mine)
    assert blocks.free == 3
    blocks.release(mine[:2])
    assert blocks.free == 5
    assert known(blocks, names(7, 8, 9)) == mine


def test_what_was_used_longest_ago_is_forgotten_first_and_ends_before_beginnings():
    blocks = BlockManager(4)
    old, new = blocks.take(2), blocks.take(2)
    for block, name in zip([*old, *new], [*names(1, 2), *names(5, 6)], strict=True):
        blocks.publish(block, name)
    blocks.release(old)
    blocks.release(new)
    assert blocks.take(1) == [old[1]]
    assert known(blocks, names(1, 2)) == old[:1]
    assert blocks.take(2) == [old[0], new[1]]
    assert known(blocks, names(5, 6)) == new[:1]


def test_what_holds_nothing_is_given_out_before_what_may_be_found():
    blocks = BlockManager(3)
    named, bare = blocks.take(1), blocks.take(1)
    blocks.publish(named[0], names(1)[0])
    blocks.release(named)
    blocks.release(bare)
    assert blocks.take(1) == bare


def test_without_caching_nothing_is_found():
    blocks = BlockManager(2, caching=False)
    blocks.publish(blocks.take(1)[0], b"x")
    assert known(blocks, [b"x"]) == []


def test_of_two_that_hold_the_same_the_first_is_found():
    blocks = BlockManager(3)
    first, second = blocks.take(2)
    blocks.publish(first, b"x")
    blocks.publish(second, b"x")
    assert known(blocks, [b"x"]) == [first]
    blocks.release([second])
    blocks.take(2)
    assert known(blocks, [b"x"]) == [first]


def test_more_than_there_are_cannot_be_taken():
    with pytest.raises(KeyError):
        BlockManager(2).take(3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=80))
def test_no_block_is_lost_or_given_twice(actions):
    blocks, held = BlockManager(8), []
    for action, value in actions:
        chain = names(*range(value))
        if action == 0 and value <= blocks.free:
            held.append(blocks.take(value))
            for block, name in zip(held[-1], chain, strict=True):
                blocks.publish(block, name)
        elif action == 1 and (found := known(blocks, chain)):
            blocks.share(found)
            held.append(found)
        elif action == 2 and held:
            blocks.release(held.pop(value % len(held)))
        used = {block for part in held for block in part}
        assert blocks.free == 8 - len(used)
        assert not any(blocks.is_free(block) for block in used)
