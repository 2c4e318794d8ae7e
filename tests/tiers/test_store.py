"""What all stores have."""

from safe_offload.tiers.store import PAGE_ITEMS, Item, pages


def test_pages_have_each_item_once():
    items = [Item("", str(number), None, 0, 0.0) for number in range(2 * PAGE_ITEMS + 1)]
    found = list(pages(items))
    assert list(map(len, found)) == [PAGE_ITEMS, PAGE_ITEMS, 1]
    assert [item for page in found for item in page] == items
