"""The names of KV blocks: what engines publish is what a router computes."""

from shared.block_hash import block_hash, prefix_hashes, root_hash
from shared.protocol import pack_token_ids


def test_names_are_stable() -> None:
    # Engines and routers of different versions must agree: these never change.
    assert root_hash() == 0
    assert root_hash("tenant") == 0xAF20B309BD126329
    assert block_hash(0, pack_token_ids([1, 2, 3, 4])) == 0x09222804E3E39BA2
    assert prefix_hashes([1, 2, 3, 4, 5], 4) == [0x09222804E3E39BA2]


def test_only_full_blocks_have_names() -> None:
    assert [len(prefix_hashes(list(range(n)), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_name_covers_everything_before() -> None:
    one, other = prefix_hashes([1, 2, 3, 4, 9, 9, 9, 9], 4), prefix_hashes([5, 2, 3, 4, 9, 9, 9, 9], 4)
    assert one[1] != other[1]
    assert prefix_hashes([1, 2, 3, 4], 4, "a") != prefix_hashes([1, 2, 3, 4], 4, "b")


def test_the_names_of_a_sequence_are_the_chain_of_its_blocks() -> None:
    token_ids = list(range(100_000, 100_000 + 50 * 16))
    chain = [root_hash("tenant")]
    for start in range(0, len(token_ids), 16):
        chain.append(block_hash(chain[-1], pack_token_ids(token_ids[start : start + 16])))
    assert prefix_hashes(token_ids, 16, "tenant") == chain[1:]
