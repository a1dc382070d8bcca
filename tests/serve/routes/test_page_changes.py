"""The page while requests are running, while the index changes, and on small screens."""

from contextlib import suppress

import pytest
from fake_index import FakeIndex, encoded, picture
from visiting import Visit, nearest, told, until

SIZES = [(1200, 500), (375, 667), (320, 568)]


def shows(page, name):
    """Wait until the image beside the results is this one."""
    page.wait_for_function("name => document.getElementById('query-words').textContent === name", arg=name)


def held(page, method, pattern):
    """Hold back requests and return them."""
    waiting = []
    page.route(pattern, lambda route: waiting.append(route) if route.request.method == method else route.continue_())
    return waiting


def test_what_is_removed_is_what_is_shown(browser, site):
    index = FakeIndex(12)
    visit = Visit(browser, site(index))
    page = visit.open("#item=5")
    nearest(page)
    waiting = held(page, "POST", "**/api/v1/search/id/*")
    page.locator(".hit button").nth(1).click()
    until(page, "document.getElementById('query').inert")  # what it shows is not where we are
    assert "#item=5" not in page.url
    assert page.inner_text("#query-words") == "1/5.png"
    page.evaluate("document.getElementById('remove').click()")  # as nobody can
    assert page.inner_text("#sure-words").startswith("1/5.png will be removed from the index.")
    page.click("#sure-dialog button[value=yes]")
    told(page, "No. 5 was removed.")
    assert [item.id for item in index.items] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    from playwright.sync_api import Error

    for route in waiting:
        with suppress(Error):  # the page has taken its question back
            route.continue_()
    visit.close()


def test_a_class_that_is_not_there_stops_nobody(browser, site):
    visit = Visit(browser, site(FakeIndex(12)))
    page = visit.open("#item=5")
    name = nearest(page)[2]
    page.fill("#filter", "owls")
    page.keyboard.press("Enter")
    assert nearest(page)[2] == name
    page.locator(".hit button").nth(2).click()
    shows(page, name)
    page.click("#remove")
    page.click("#sure-dialog button[value=yes]")
    told(page, f"No. {name.split('/')[1].removesuffix('.png')} was removed.")
    until(page, "document.getElementById('results-title').textContent === 'Browse the index'")
    assert page.inner_text("#filter-wrong") == "Unknown class “owls”: showing all classes."
    assert page.is_visible("#problem")  # and the news stays beside it
    visit.close()


def test_the_last_of_a_class_takes_the_class_along(browser, site):
    index = FakeIndex(12)
    index.add_images([("owl.png", picture(77, 100), "owls", {})])
    visit = Visit(browser, site(index))
    page = visit.open("#item=12")
    nearest(page)
    page.fill("#filter", "owls")
    until(page, "document.getElementById('results-title').textContent === 'No neighbors'")
    page.click("#remove")
    page.click("#sure-dialog button[value=yes]")
    told(page, "No. 12 was removed.")
    until(page, "document.getElementById('results-title').textContent === 'Browse the index'")
    assert page.inner_text("#facts").endswith("12 images · 4 classes")
    told(page, "No. 12 was removed.")
    visit.close()


def test_pictures_are_taken_after_one_that_was_refused_and_after_a_reload(browser, site):
    visit = Visit(browser, site(FakeIndex(12)))
    visit.page.add_init_script(
        "window.revoked = 0; const revoke = URL.revokeObjectURL.bind(URL);"
        "URL.revokeObjectURL = (url) => { window.revoked += 1; revoke(url); };"
    )
    page = visit.open()
    visit.upload(b"%PDF-1.7 not a picture", "report.pdf")
    told(page, "Cannot read the image: a PDF document, not an image.")
    assert page.evaluate("window.revoked") == 1
    visit.upload(encoded(picture(3)))
    assert nearest(page)[0] == "3/3.png"
    page.reload()
    until(page, "document.getElementById('results-title').textContent === 'Image not available'")
    visit.upload(encoded(picture(6)))
    assert nearest(page)[0] == "2/6.png"
    visit.close()


def test_a_new_class_is_known_everywhere(browser, site):
    visit = Visit(browser, site(FakeIndex(12)))
    page = visit.open("#map")
    page.click("#legend button >> text=class 1")
    visit.upload(encoded(picture(77, 100)), "new.png")
    nearest(page)
    page.fill("#add-label", "aaa")  # it comes before the others, whose numbers move up
    page.click("#add button")
    told(page, "Added as no. 12.")
    assert page.inner_text("#facts").endswith("13 images · 5 classes")
    page.click("#tab-map")
    until(page, "document.getElementById('legend').childElementCount === 5")
    assert page.input_value("#map-filter") == "class 1"
    assert page.locator("#legend button[aria-pressed=true]").all_inner_texts() == ["class 1"]
    visit.close()


def test_the_first_class_can_be_chosen(browser, site):
    visit = Visit(browser, site(FakeIndex()))
    page = visit.open()
    assert page.get_attribute("#filter", "placeholder") == "no classes"
    assert page.is_disabled("#filter")
    visit.upload(encoded(picture(3)))
    until(page, "document.getElementById('results-title').textContent === 'No neighbors'")
    page.fill("#add-label", "jay")
    page.click("#add button")
    told(page, "Added as no. 0.")
    assert page.get_attribute("#filter", "placeholder") == "all classes"
    assert page.is_enabled("#filter")
    visit.close()


def test_who_has_gone_elsewhere_is_told_and_left_there(browser, site):
    visit = Visit(browser, site(FakeIndex(12)))
    page = visit.open()
    visit.upload(encoded(picture(77, 100)), "new.png")
    nearest(page)
    waiting = held(page, "POST", "**/api/v1/items")
    with page.expect_request(lambda request: request.method == "POST"):
        page.click("#add button")
    page.click("#tab-map")
    until(page, "document.getElementById('points').dataset.painted === '12'")
    waiting[0].continue_()
    told(page, "Added as no. 12.")
    until(page, "document.getElementById('points').dataset.painted === '13'")
    assert "#map" in page.url
    visit.close()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_new_search_begins_where_it_is_seen(browser, site, width, height):
    visit = Visit(browser, site(FakeIndex(40)), viewport={"width": width, "height": height})
    page = visit.open("#item=5")
    name = nearest(page)[-1]
    page.locator(".hit button").last.click()
    shows(page, name)
    until(page, "document.getElementById('results-title').getBoundingClientRect().top > 40")
    assert page.evaluate("document.querySelector('.hit').getBoundingClientRect().top < innerHeight")
    page.go_back()
    shows(page, "1/5.png")
    until(page, "document.querySelector('.hit').getBoundingClientRect().top < 0")  # back where the click was
    page.evaluate("document.body.dispatchEvent(new ClipboardEvent('paste', { bubbles: true }))")
    told(page, "There is no image in the clipboard.")
    assert page.locator("#problem").bounding_box()["y"] > 0  # words are seen from there
    visit.close()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_has_room(browser, site, width, height):
    visit = Visit(browser, site(FakeIndex(40)), viewport={"width": width, "height": height})
    page = visit.open("#item=5")
    nearest(page)
    cut = "[...document.querySelectorAll('.hit .label')].filter((each) => each.scrollWidth > each.clientWidth).length"
    assert page.evaluate(cut) == 0
    for tab in ("#tab-map", "#tab-search"):
        page.click(tab)
        assert page.evaluate("document.documentElement.scrollWidth") == width, tab
    visit.close()
