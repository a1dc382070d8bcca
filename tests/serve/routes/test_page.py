"""The page in a real browser."""

import base64
import re
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import numpy as np
import pytest
from fake_index import FakeIndex, encoded, picture, threshold
from PIL import Image
from playwright.sync_api import Error
from runs import write_run
from visiting import Visit, nearest, told, until

import nearfar as nf
from nearfar.search.items import Item
from nearfar.serve import Limits, security, server
from nearfar.serve.catalog import encode_map

SIZES = [(1200, 500), (375, 667), (320, 568)]
NASTY = '<img src=x onerror="document.title=1">'


def index():
    colors = FakeIndex(40)
    colors.add_images([(NASTY, picture(400, 200), NASTY, {})])
    return colors


@pytest.fixture(scope="module")
def address(site):
    return site(index(), name="colors", limits=Limits(upload_bytes=2**20))


@pytest.fixture
def visits(browser):
    """Open pages, which are checked and closed at the end."""
    with ExitStack() as stack:
        yield lambda address, **settings: stack.enter_context(closing(Visit(browser, address, **settings)))


@pytest.fixture
def visit(visits, address):
    return visits(address)


def shows(page, name):
    """Wait until the image beside the results is this one."""
    page.wait_for_function("name => document.getElementById('query-words').textContent === name", arg=name)


def held(page, method, pattern):
    """Hold back requests and return them."""
    waiting = []
    page.route(pattern, lambda route: waiting.append(route) if route.request.method == method else route.continue_())
    return waiting


def test_a_picture_is_searched_with_by_choosing_dropping_and_pasting(visit):
    page = visit.open()
    visit.upload(encoded(picture(3)))
    assert nearest(page)[0] == "3/3.png"
    assert page.inner_text(".hit .score") == "1.000"
    assert page.inner_text("#query-title") == "Your image"
    for number, kind in ((6, "drop"), (9, "paste")):
        content = base64.b64encode(encoded(picture(number))).decode()
        page.evaluate(
            """([kind, content]) => {
                const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
                const data = new DataTransfer();
                data.items.add(new File([bytes], "x.png", { type: "image/png" }));
                const event = kind === "drop"
                  ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
                  : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
                document.body.dispatchEvent(event);
            }""",
            [kind, content],
        )
        page.wait_for_function(
            "name => document.querySelector('.hit .name')?.textContent === name", arg=f"{number % 4}/{number}.png"
        )


def test_neighbors_lead_on_and_back(visit):
    page = visit.open("#item=5")
    first = nearest(page)
    assert page.inner_text("#query-words") == "1/5.png"
    assert page.locator(".hit.same").count() >= 9
    page.locator(".hit button").nth(1).click()
    shows(page, first[1])
    assert page.locator("#steps li").count() == 2
    page.click("#back")
    shows(page, "1/5.png")
    assert nearest(page) == first
    page.click("#forward")
    shows(page, first[1])
    page.go_back()
    shows(page, "1/5.png")


def test_a_class_can_be_chosen(visit):
    page = visit.open("#item=5")
    nearest(page)
    page.fill("#filter", "class 2")
    until(page, "document.getElementById('results-words').textContent.includes('class 2 only')")
    assert set(page.locator(".hit .label").all_inner_texts()) == {"class 2"}
    page.fill("#filter", "owls")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('filter-wrong').textContent === 'Unknown class “owls”: showing all classes.'")
    until(page, "!document.getElementById('results-words').textContent.includes('only')")


def test_what_goes_wrong_is_told_in_words(visit):
    page = visit.open()
    visit.upload(b"%PDF-1.7 not a picture", "report.pdf")
    told(page, "Cannot read the image: a PDF document, not an image.")
    page.click("#dismiss")
    assert page.is_hidden("#problem")
    visit.upload(bytes(2 * 2**20))
    told(page, "The file has 2.0 MiB; the limit is 1.0 MiB.")
    page.goto(f"{visit.address}/#item=999")
    told(page, "Id is 999; the index has no such item among its 41.")
    page.evaluate(
        "document.body.dispatchEvent(new ClipboardEvent('paste', { clipboardData: new DataTransfer(), bubbles: true }))"
    )
    told(page, "There is no image in the clipboard.")
    page.goto(f"{visit.address}/#upload=77")
    until(page, "document.getElementById('results-title').textContent === 'Image not available'")


def test_a_server_that_is_gone_is_told_and_asked_again(visit):
    page = visit.open()
    page.route("**/api/v1/search/**", lambda route: route.abort())
    page.locator(".hit button").first.click()
    told(page, "The server does not respond. Is it still running?")
    page.unroute("**/api/v1/search/**")
    page.click("#retry")
    assert nearest(page)


def test_matches_are_told_with_their_error_rates_and_a_stranger_is_unknown(visits, site):
    colors = index()
    colors.set_threshold(threshold(similarity=0.8))
    visit = visits(site(colors, name="colors"))
    page = visit.open("#item=3")
    assert len(nearest(page)) == 24
    matching = sum(float(score) >= 0.8 for score in page.locator(".hit .score").all_inner_texts())
    assert 0 < matching < 24
    assert page.locator(".hit:not(.far) .match", has_text=re.compile("^match$")).count() == matching
    assert page.locator(".hit.far .match", has_text=re.compile("^no match$")).count() == 24 - matching
    words = page.inner_text("#decision")
    assert words.startswith(f"{matching} images of 24 match.")
    assert "0.10 % of the pairs of two classes match, and 4.25 % of the pairs of one class do not" in words
    visit.upload(encoded(Image.fromarray(np.random.default_rng(7).integers(0, 256, (32, 32, 3), dtype=np.uint8))))
    page.locator("#decision strong", has_text=re.compile("^No match.$")).wait_for(state="visible")
    page.click(".hit button")
    page.locator("#decision strong", has_text="match.").wait_for(state="visible")
    page.goto(f"{visit.address}/#search")
    page.locator("#decision").wait_for(state="hidden")


def test_no_match_is_told_with_the_rates_of_searches_among_as_many_images(visits, site):
    colors, rng = index(), np.random.default_rng(0)
    classes = np.arange(20).repeat(6)
    points = rng.normal(size=(20, 8))[classes] + 0.8 * rng.normal(size=(120, 8))
    colors.set_threshold(nf.metrics.calibrate_search(points, classes))
    shares = (colors.threshold.unknown_accept, colors.threshold.known_found)
    assert [round(100 * share) for share in shares] == [5, 29]
    visit = visits(site(colors, name="colors"))
    page = visit.open("#item=3")
    visit.upload(encoded(Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))))
    page.locator("#decision strong", has_text=re.compile("^No match.$")).wait_for(state="visible")
    words = "Among 41 images, 5 of 100 strangers, whose class is not here, would match, and 29 of 100 known images are"
    assert words in page.inner_text("#decision")
    few = nf.metrics.calibrate_search(points[:24], classes[:24])
    colors.set_threshold(replace(few, about={"note": "these classes were trained on"}))
    page = visit.open("#item=3")
    page.reload()
    words = re.compile("Among 41 images, about .*, estimated from 18 images; these classes were trained on.$")
    page.locator("#decision span", has_text=words).wait_for(state="visible")


def test_the_map_is_painted_and_leads_to_a_search(visit):
    page = visit.open("#map")
    until(page, "document.getElementById('points').dataset.painted === '41'")
    box = page.locator("#points").bounding_box()
    points = index().map_with_ids()[1]
    low, size = points.min(axis=0), np.ptp(points, axis=0)
    scale = 0.92 * min(box["width"] / size[0], box["height"] / size[1])
    x, y = (points[7] - low - size / 2) * scale + (box["width"] / 2, box["height"] / 2) + (box["x"], box["y"])
    page.mouse.move(x, y)
    page.wait_for_selector("#tip", state="visible")
    until(page, "document.querySelector('#tip img').naturalWidth > 0")
    until(page, "document.querySelector('#tip span').textContent.trim() !== ''")
    name = page.inner_text("#tip span")
    assert name == "3/7.png"
    page.mouse.down()
    page.mouse.up()
    shows(page, name)
    assert nearest(page)


def test_the_map_moves_under_the_hand_and_shows_thumbnails_from_near(visit):
    page = visit.open("#map")
    until(page, "document.getElementById('points').dataset.painted === '41'")
    box = page.locator("#points").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    until(page, "Number(document.getElementById('points').dataset.zoom) > 1.5")
    page.click("#zoom-in")
    page.click("#zoom-in")
    until(page, "Number(document.getElementById('above').dataset.thumbnails) > 0")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 900, y + 500, steps=4)
    page.mouse.up()
    until(page, "Number(document.getElementById('points').dataset.painted) < 41")
    assert "#map" in page.url  # a drag is no click
    page.click("#zoom-all")
    until(page, "document.getElementById('points').dataset.painted === '41'")
    page.locator("#legend button").nth(1).click()
    assert page.input_value("#map-filter") == page.locator("#legend button").nth(1).inner_text()


def test_a_hundred_thousand_points_move_smoothly(visit):
    count = 100_000
    rng = np.random.default_rng(0)
    labels = [f"class {number}" for number in range(200)]
    classes = rng.integers(0, 200, count)
    points = rng.normal(size=(200, 2))[classes] * 3 + rng.normal(size=(count, 2))
    items = [Item(number, "", labels[row]) for number, row in enumerate(classes.tolist())]
    body = encode_map(points, items, labels, "v")
    visit.page.route("**/api/v1/map", lambda route: route.fulfill(body=body, content_type="application/octet-stream"))
    page = visit.open("#map")
    until(page, f"document.getElementById('points').dataset.painted === '{count}'")
    times = page.evaluate(
        """async () => {
            const canvas = document.getElementById("points"), times = [];
            for (let step = 0; step < 40; step += 1) {
                const turn = { deltaY: step < 20 ? -60 : 60, clientX: 500, clientY: 400, cancelable: true };
                canvas.dispatchEvent(new WheelEvent("wheel", turn));
                await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
                times.push(Number(canvas.dataset.ms));
            }
            return times;
        }"""
    )
    assert np.quantile(times, 0.1) < 50, times  # a few ms where no other process takes the time


def test_the_page_is_used_by_keyboard_alone(visit):
    page = visit.open()
    page.wait_for_selector(".hit button")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'content'")
    assert page.url == f"{visit.address}/"  # still where we were
    page.locator(".hit button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("[...document.querySelectorAll('.hit button')].indexOf(document.activeElement)") > 2
    page.keyboard.press("Enter")
    nearest(page)
    until(page, "document.activeElement.closest('.hit') !== null")  # and on from there
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("class 1")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('results-words').textContent.includes('class 1 only')")
    page.keyboard.press("Tab")
    page.focus("#tab-search")
    page.keyboard.press("ArrowRight")
    until(page, "location.hash === '#map'")
    until(page, "document.getElementById('points').dataset.painted > '0'")
    page.focus("#points")
    page.keyboard.press("0")
    page.wait_for_selector("#tip", state="visible")
    page.keyboard.press("+")
    until(page, "Number(document.getElementById('points').dataset.zoom) > 1.2")
    page.keyboard.press("Enter")
    until(page, "location.hash.startsWith('#item=')")
    page.keyboard.press("b")
    until(page, "location.hash === '#map'")
    page.keyboard.press("?")
    page.wait_for_selector("#help-dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#help-dialog[open]", state="detached")


def test_names_are_text_and_never_markup(visit):
    page = visit.open("#item=40")
    nearest(page)
    assert page.inner_text("#query-title") == NASTY
    page.click("#tab-map")
    until(page, "document.getElementById('legend').childElementCount === 5")
    assert NASTY in page.locator("#legend button").all_inner_texts()
    assert page.title() == "colors · nearfar"


def test_the_browser_enforces_the_policy(visit):
    """The response has every security header, and Chromium itself refuses what the page could be tricked into."""
    visit.open()
    answer = visit.page.goto(visit.address)
    for name, value in security.RESPONSE_HEADERS.items():
        assert answer.header_value(name) == value or name == "cache-control", name
    until(visit.page, "document.getElementById('facts').textContent !== ''")
    refused = visit.page.evaluate(
        """async () => {
            const refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            const add = (name, settings) => document.body.append(Object.assign(document.createElement(name), settings));
            add("script", { textContent: "document.title = 'inline'" });
            add("script", { src: "http://other.example/x.js" });
            add("style", { textContent: "body { display: none }" });
            add("img", { src: "http://other.example/x.png" });
            add("iframe", { src: "http://other.example/" });
            add("object", { data: "http://other.example/" });
            setTimeout("document.title = 'evaluated'", 0);
            await fetch("http://other.example/").catch(() => {});
            const until = Date.now() + 5000;
            while (refused.length < 8 && Date.now() < until) await new Promise((done) => setTimeout(done, 20));
            return refused;
        }"""
    )
    wanted = {"script-src-elem", "style-src-elem", "img-src", "frame-src", "object-src", "connect-src", "script-src"}
    assert wanted <= set(refused)
    assert visit.page.title() not in ("inline", "evaluated")
    visit.complaints.clear()  # the console tells of each
    visit.asked[:] = [url for url in visit.asked if "other.example" not in url]


def test_day_and_night(visits, address):
    visit = visits(address, color_scheme="dark")
    page = visit.open()
    color = "getComputedStyle(document.body).backgroundColor"
    night = page.evaluate(color)
    page.click("#theme")
    day = page.evaluate(color)
    assert night != day
    page.reload()
    page.wait_for_selector(".hit")
    assert page.evaluate(color) == day  # the choice is kept


def test_an_answer_that_comes_too_late_is_not_shown(visits, site):
    visit = visits(site(FakeIndex(12)))
    waiting = []
    visit.page.route("**/api/v1/items?*", lambda route: waiting.append(route))
    page = visit.open()
    visit.upload(encoded(picture(77, 100)), "new.png")
    nearest(page)
    assert len(waiting) == 1
    with suppress(Error):  # the page has taken its question back
        waiting[0].continue_()
    page.wait_for_timeout(300)
    assert page.inner_text("#results-title") == "Nearest neighbors"
    assert page.is_visible("#add")


def test_pictures_are_added_and_removed(visits, site):
    visit = visits(site(FakeIndex(12)))
    page = visit.open()
    visit.upload(encoded(picture(77, 100)), "new.png")
    nearest(page)
    page.fill("#add-label", "late")
    page.click("#add button")
    told(page, "Added as no. 12.")
    until(page, "document.getElementById('query-title').textContent === 'late'")
    until(page, "document.getElementById('facts').textContent.includes('13 images')")
    page.click("#remove")
    page.click("#sure-dialog button[value=no]")
    page.click("#remove")
    page.click("#sure-dialog button[value=yes]")
    told(page, "No. 12 was removed.")
    until(page, "document.getElementById('facts').textContent.includes('12 images')")


def test_a_read_only_server_offers_no_changes(visits, site):
    visit = visits(site(FakeIndex(12), read_only=True))
    page = visit.open("#item=2")
    nearest(page)
    assert page.is_hidden("#remove")
    visit.upload(encoded(picture(1)))
    until(page, "document.getElementById('query-title').textContent === 'Your image'")
    assert page.is_hidden("#add")


def test_the_page_asks_for_the_token(visits, site):
    token = "100%-open-sesame-please/#?&"
    visit = visits(site(FakeIndex(12), token=token))
    page = visit.page
    page.goto(visit.address)
    page.wait_for_selector("#token-dialog[open]")
    page.fill("#token", "wrong")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('token-wrong').textContent === 'The token is wrong.'")
    page.fill("#token", token)
    page.keyboard.press("Enter")
    page.wait_for_selector(".hit img")
    until(page, "document.querySelector('.hit img').naturalWidth > 0")
    other = visits(visit.address)
    page = other.page
    page.goto(server.page_url(other.address, token))
    page.wait_for_selector(".hit")
    assert "token" not in page.url


def test_the_leaderboard_of_runs(visits, site, tmp_path):
    for name, loss, score in (("one", "nra", 0.7), ("two", "multi_similarity", 0.6), ("three", "triplet", 0.5)):
        write_run(tmp_path / name, loss, score)
    (tmp_path / "three" / "manifest.json").unlink()
    visit = visits(site(FakeIndex(12), runs=[tmp_path]))
    page = visit.open()
    page.click("#leaderboard")
    page.wait_for_selector("section.verdict")
    assert page.inner_text("section.verdict h2") == "✓ Fair comparison"
    page.click("summary")
    reason = "three cannot be read: the run in three cannot be compared: manifest.json is missing"
    assert reason in page.inner_text("section.verdict")
    names = page.locator("table.sorts tbody th")
    assert names.all_inner_texts() == ["nra", "multi_similarity"]
    page.click("text=Recall@1, %")
    page.click("text=Recall@1, %")
    assert names.all_inner_texts() == ["multi_similarity", "nra"]
    page.click("text=MAP@R")
    assert page.url.endswith("/leaderboard?metric=map%40r")
    page.go_back()
    page.go_back()
    until(page, "document.querySelectorAll('.hit').length > 0")


def test_a_card_does_not_repeat_the_class_as_a_folder(visits, site):
    jays = FakeIndex(1)
    jays.add_images([("jay/1.png", picture(3), "jay", {}), ("jays/2.png", picture(4), "jay", {})])
    visit = visits(site(jays))
    page = visit.open("#item=0")
    assert sorted(nearest(page)) == ["1.png", "jays/2.png"]


# --- while requests are running, while the index changes, and on small screens ------------------------------------


def test_what_is_removed_is_what_is_shown(visits, site):
    index = FakeIndex(12)
    visit = visits(site(index))
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
    for route in waiting:
        with suppress(Error):  # the page has taken its question back
            route.continue_()


def test_a_class_that_is_not_there_stops_nobody(visits, site):
    visit = visits(site(FakeIndex(12)))
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


def test_the_last_of_a_class_takes_the_class_along(visits, site):
    index = FakeIndex(12)
    index.add_images([("owl.png", picture(77, 100), "owls", {})])
    visit = visits(site(index))
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


def test_pictures_are_taken_after_one_that_was_refused_and_after_a_reload(visits, site):
    visit = visits(site(FakeIndex(12)))
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


def test_a_new_class_is_known_everywhere(visits, site):
    visit = visits(site(FakeIndex(12)))
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


def test_the_first_class_can_be_chosen(visits, site):
    visit = visits(site(FakeIndex()))
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


def test_who_has_gone_elsewhere_is_told_and_left_there(visits, site):
    visit = visits(site(FakeIndex(12)))
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


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_new_search_begins_where_it_is_seen(visits, site, width, height):
    visit = visits(site(FakeIndex(40)), viewport={"width": width, "height": height})
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


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_has_room(visits, site, width, height):
    visit = visits(site(FakeIndex(40)), viewport={"width": width, "height": height})
    page = visit.open("#item=5")
    nearest(page)
    cut = (
        "[...document.querySelectorAll('.hit .label')].filter((label) => label.scrollWidth > label.clientWidth).length"
    )
    assert page.evaluate(cut) == 0
    for tab in ("#tab-map", "#tab-search"):
        page.click(tab)
        assert page.evaluate("document.documentElement.scrollWidth") == width, tab
