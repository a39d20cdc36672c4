"""Names that look like markup, formulas or paths: everywhere on the pages they are text."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from conftest import HOSTILE, hostile  # type: ignore[attr-defined]
from playwright.sync_api import expect

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]


def test_names_stay_names(site: Any, visit: Any) -> None:
    run_id = hostile().run_id
    visitor = visit()
    page = visitor.open(f"/saturn/plan/hostile/{quote(run_id, safe='')}")
    rows = page.locator("#table tbody tr:not(.reasons)")
    expect(rows).to_have_count(len(HOSTILE))
    told = [name.strip() for name in page.locator("#table tbody tr button").all_text_contents()]
    for name in HOSTILE:
        assert name.strip() in told, (name, told)
        rows.get_by_role("button", name=name, exact=True).first.click()
        expect(page.locator("#details-title")).to_have_text(name)
        page.get_by_label("Close the details").click()
    expect(page.get_by_text(HOSTILE[3]).first).to_be_attached()
    page.get_by_label("Find").fill(HOSTILE[4])
    expect(page.locator("#table tbody tr:not([hidden], .reasons)")).to_have_count(1)
    page.get_by_label("Find").fill("")
    box = page.locator("#chart").bounding_box()
    seen = set()
    for x in range(5, int(box["width"]), 40):
        for y in range(5, int(box["height"]), 12):
            page.locator("#chart").hover(position={"x": x, "y": y}, force=True)
            if page.locator(".tip strong").is_visible():
                seen.add(page.locator(".tip strong").text_content())
    assert len(seen & set(HOSTILE)) >= 3, seen
    # Nothing of these names has become part of the document.
    assert page.locator("img[src=x], svg[onload], [onmouseover], [onerror]").count() == 0
    scripts = page.evaluate("[...document.scripts].map(script => script.src)")
    assert all(source.startswith(f"{site.url}/saturn/static/") for source in scripts)
    assert page.evaluate("Object.keys(Object.prototype)") == [], "of a name __proto__"
    page.goto("/saturn/sweeps/hostile")
    expect(page.locator("#sweeps tbody tr")).to_contain_text(run_id)
    link = page.locator("#sweeps tbody tr a").first
    link.click()
    expect(page.locator("#table tbody tr:not(.reasons)")).to_have_count(len(HOSTILE))
