"""Ids: ordered in time, unguessable, and an item's leads to its response."""

import re

from antiphon.engine.ids import BrandedMint, Mint, find_owner, new_token


def test_tokens_made_later_sort_later_and_never_repeat() -> None:
    tokens = [new_token() for _ in range(1000)]
    assert [token[:12] for token in tokens] == sorted(token[:12] for token in tokens)
    assert len(set(tokens)) == 1000


def test_an_items_id_leads_to_its_response() -> None:
    mint = Mint()
    assert re.fullmatch(r"resp_[0-9a-f]{44}", mint.response_id)
    assert find_owner(mint("msg")) == find_owner(mint("fc")) == mint.response_id


def test_ids_from_elsewhere_lead_nowhere() -> None:
    assert [find_owner(foreign) for foreign in ("", "msg", "msg_1", f"resp_{'0' * 44}")] == [None] * 4


def test_a_mint_set_back_makes_the_same_ids_again() -> None:
    mint = Mint()
    first = [mint("msg"), mint("fc")]
    assert [Mint(mint.token)("msg"), Mint(mint.token, minted=1)("fc")] == first


def test_branded_ids_show_their_brand_and_lead_nowhere() -> None:
    mint = BrandedMint("AM-")
    assert re.fullmatch(r"resp_AM-[0-9]{13}-[0-9a-z]{8}", mint.response_id)
    assert mint.response_id == mint.response_id
    assert re.fullmatch(r"msg_AM-[0-9a-z]{12}", mint("msg"))
    assert find_owner(mint("msg")) is None
    assert len({mint("fc") for _ in range(1000)}) == 1000
