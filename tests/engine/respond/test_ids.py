"""Ids: time-ordered, unguessable, and derived from the response."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from antiphon.engine.respond.ids import BrandedMint, Mint, new_token, random_hex
from antiphon.store.base import parse_response_id


def test_later_tokens_sort_later_and_never_repeat() -> None:
    tokens = [new_token() for _ in range(1000)]
    assert [token[:12] for token in tokens] == sorted(token[:12] for token in tokens)
    assert len(set(tokens)) == 1000


def test_response_is_derived_from_item_id() -> None:
    mint = Mint()
    assert re.fullmatch(r"resp_[0-9a-f]{44}", mint.response_id)
    assert parse_response_id(mint.new_id("msg")) == parse_response_id(mint.new_id("fc")) == mint.response_id


def test_foreign_ids_have_no_response() -> None:
    assert [parse_response_id(foreign) for foreign in ("", "msg", "msg_1", f"resp_{'0' * 44}")] == [None] * 4


def test_reset_mint_creates_same_ids() -> None:
    mint = Mint()
    first = [mint.new_id("msg"), mint.new_id("fc")]
    assert [Mint(mint.token).new_id("msg"), Mint(mint.token, minted=1).new_id("fc")] == first


def test_branded_ids_have_prefix_and_no_response() -> None:
    mint = BrandedMint("AM-")
    assert re.fullmatch(r"resp_AM-[0-9]{13}-[0-9a-z]{8}", mint.response_id)
    assert mint.response_id == mint.response_id
    assert re.fullmatch(r"msg_AM-[0-9a-z]{12}", mint.new_id("msg"))
    assert parse_response_id(mint.new_id("msg")) is None
    assert len({mint.new_id("fc") for _ in range(1000)}) == 1000


def test_threads_never_get_same_random_value() -> None:
    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(lambda _: random_hex(), range(20_000), chunksize=500))
    assert len(set(taken)) == len(taken)
    assert {len(each) for each in taken} == {32}


def test_forked_process_does_not_use_parents_random_values() -> None:
    random_hex()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, random_hex().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        theirs = pipe.read()
    assert len(theirs) == 32
    assert theirs not in [random_hex() for _ in range(300)]


@pytest.mark.parametrize("minted", [0, 9, 10, 255, 256, 4095, 4096, 65535, 65536, 2**20])
def test_item_id_ends_in_its_number_in_hex(minted: int) -> None:
    assert Mint("t", minted).new_id("msg") == f"msg_t{minted:04x}"
