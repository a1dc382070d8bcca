"""A page in a real browser, and functions that wait for its content."""

import re
from urllib.parse import urlsplit

WAIT = 15_000


class Visit:
    """A page, its requests and its errors."""

    def __init__(self, browser, address, **settings):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 760}, **settings})
        self.context.set_default_timeout(WAIT)
        self.page = self.context.new_page()
        self.address = address
        self.asked = []
        self.complaints = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._console)

    def _console(self, message):
        # Answers of 4xx are shown by the browser as errors; that is what some tests are about.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def open(self, where=""):
        self.page.goto(f"{self.address}/{where}")
        until(self.page, "document.getElementById('facts').textContent !== ''")
        return self.page

    def upload(self, content, name="mine.png"):
        self.page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": content})

    def close(self):
        host = urlsplit(self.address).netloc
        assert all(urlsplit(url).netloc == host or url.startswith("blob:") for url in self.asked), self.asked
        assert self.complaints == []
        self.context.close()


def until(page, holds):
    """Wait for a condition; passed as a function, because the page's policy forbids evaluating text."""
    page.wait_for_function(f"() => {holds}")


def told(page, words):
    """Wait until the page shows this message."""
    page.locator("#problem p", has_text=re.compile(f"^{re.escape(words)}$")).wait_for(state="visible")


def nearest(page):
    """Wait for the results of a search and return their names."""
    until(page, "document.getElementById('results-title').textContent === 'Nearest neighbors'")
    page.wait_for_selector(".hits:not(.waiting) .hit .score")
    return list(page.locator(".hit .name").all_inner_texts())
