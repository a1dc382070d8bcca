"""Access control and limits of requests."""

import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from fake_index import DIM, FakeIndex, encoded, picture
from fastapi.testclient import TestClient
from odd_files import many_scans
from waiting import wait_for

from nearfar import serve
from nearfar.serve import Limits, create, security
from nearfar.serve.routes.search import vector_bytes

API = "/api/v1"
TOKEN = "correct-horse-battery-staple"
Client = Callable[..., TestClient]


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "192.168.1.5", "", "[::2"]
)
def test_other_names_than_its_own_are_refused(client, host):
    assert code(client().get(f"{API}/info", headers={"host": host})) == (403, "host")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:1", "[::1]:8000", "127.8.8.8"])
def test_the_loopback_is_its_own_name(client, host):
    assert client().get(f"{API}/info", headers={"host": host}).status_code == 200


def test_names_and_addresses_can_be_allowed(client):
    served = client(hosts=["Photos.example"], addresses=True)
    for host, status in (("photos.example:80", 200), ("10.0.0.7:8000", 200), ("[fe80::1]", 200), ("evil.example", 403)):
        assert served.get(f"{API}/info", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/search/id/3"), ("DELETE", "/items/3"), ("POST", "/items")])
def test_pages_from_elsewhere_change_nothing(client, headers, method, path):
    assert code(client().request(method, API + path, headers=headers)) == (403, "origin")


def test_its_own_page_may_write(client):
    headers = {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}
    assert client().delete(f"{API}/items/3", headers=headers).status_code == 200


def test_every_answer_carries_its_headers(client):
    served = client()
    for path in ("/", "/page/app.js", f"{API}/info", "/nothing", "/metrics", f"{API}/items/3/thumbnail"):
        headers = served.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


def _everything(served):
    for path, ways in served.app.openapi()["paths"].items():
        for method in ways:
            yield method.upper(), path.replace("{id}", "3")


def test_without_the_token_nothing_is_told(client):
    served = client(token=TOKEN)
    public = {f"{API}/health", f"{API}/session"}
    asked = [(method, path) for method, path in _everything(served) if path not in public]
    assert len(asked) >= 12
    for method, path in [*asked, ("GET", f"{API}/openapi.json"), ("GET", "/nothing")]:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"cookie": f"{security.COOKIE}=wrong"},
            {"authorization": TOKEN},
        ):
            assert code(served.request(method, path, headers=headers)) == (401, "no_token"), (method, path)
    assert served.get(f"{API}/health").json() == {"status": "ok", "token_needed": True}
    assert served.get("/").status_code == 200


def test_the_token_opens(client):
    served = client(token=TOKEN)
    assert served.get(f"{API}/info", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert code(served.post(f"{API}/session", json={"token": "wrong"})) == (401, "no_token")
    answer = served.post(f"{API}/session", json={"token": TOKEN})
    assert answer.status_code == 204
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    for word in ("HttpOnly", "SameSite=strict", "Path=/"):
        assert word in cookie
    assert served.get(f"{API}/items/3/thumbnail").status_code == 200  # by the cookie


def test_odd_cookies_of_others_do_not_lock_out(client):
    session = f"{security.COOKIE}={security.session_value(TOKEN)}"
    for other in ('other={"a":1}', "a b=c d", "=", "x", 'y="unfinished'):
        for cookie in (f"{other}; {session}", f"{session}; {other}"):
            assert client(token=TOKEN).get(f"{API}/info", headers={"cookie": cookie}).status_code == 200, cookie


def test_servers_on_two_ports_keep_their_own_sessions(site):
    servers = {site(FakeIndex(4), token=token): token for token in (TOKEN, TOKEN[::-1])}
    with httpx.Client() as browser:  # as all browsers it minds the host of a cookie and not the port
        for address, token in servers.items():
            assert browser.post(f"{address}{API}/session", json={"token": token}).status_code == 204
        assert [browser.get(f"{address}{API}/info").status_code for address in servers] == [200, 200]


def test_tokens_are_compared_in_constant_time(monkeypatch):
    compared = []
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert not security.is_authorized({"authorization": "Bearer nope"}, TOKEN)
    assert not security.is_authorized({"cookie": f"{security.COOKIE}=nope"}, TOKEN)
    assert len(compared) == 2


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "token has 0 characters, at most 0 bits; 128 are required: --token new"),
        ("x" * 21, "at most 126 bits"),
        ("7" * 38, "at most 126 bits"),
        ("f" * 31, "at most 124 bits"),
        ("no spaces are allowed in it", "other than printable ASCII"),
        ("ümlaut-ümlaut-ümlaut-ümlaut", "other than printable ASCII"),
    ],
)
def test_weak_tokens_are_refused(token, message):
    with pytest.raises(ValueError, match=message):
        create(FakeIndex(1), token=token)


@pytest.mark.parametrize("token", ["x" * 22, "7" * 39, "f" * 32])
def test_tokens_of_128_bits_are_accepted(token):
    assert security.check_token(token) == token
    assert security.check_token(security.new_token())


def test_wrong_tokens_keep_nobody_out(client):
    """Thousands of wrong tokens of one address, as headers, as cookies of an earlier server and at the login."""
    served = client(token=TOKEN)
    right = {"authorization": f"Bearer {TOKEN}"}
    old = {"cookie": f"{security.COOKIE}={security.session_value(security.new_token())}"}
    for _ in range(300):
        for wrong in ({"authorization": "Bearer wrong"}, old):
            assert code(served.get(f"{API}/info", headers=wrong)) == (401, "no_token")
        assert code(served.post(f"{API}/session", json={"token": "wrong"})) == (401, "no_token")
    assert served.get(f"{API}/info", headers={**right, **old}).status_code == 200
    assert served.post(f"{API}/session", json={"token": TOKEN}).status_code == 204


def test_few_clients_are_remembered(monkeypatch):
    monkeypatch.setattr(security, "MAX_CLIENTS", 10)
    limit = security.RateLimit(rate=1.0, burst=1)
    for number in range(1000):
        assert limit.wait(str(number), now=number) == 0
    assert len(limit._due) <= 10
    assert limit.wait("999", now=999.0) == 1


def test_one_client_cannot_take_all_the_time(client):
    served = client(address="203.0.113.7", limits=Limits(client_rate=0.5))
    assert [served.get(f"{API}/info").status_code for _ in range(7)] == [200] * 5 + [429] * 2
    assert served.get(f"{API}/info").headers["retry-after"] == "2"
    for other in ("203.0.113.8", "127.0.0.1"):
        again = TestClient(served.app, base_url="http://127.0.0.1", client=(other, 1))
        assert [again.get(f"{API}/info").status_code for _ in range(5)] == [200] * 5
    assert again.get(f"{API}/info").status_code == 200  # programs on this machine are not counted


def test_json_has_a_small_limit(client):
    served = client(token=TOKEN)
    served.headers["content-type"] = "application/json"
    keys = ", ".join(f'"k{number}": 0' for number in range(3000))
    assert code(served.post(f"{API}/session", content=f"{{{keys}}}")) == (413, "too_large")
    few = "{" + keys[:12_000].rpartition(",")[0] + "}"
    answer = served.post(f"{API}/session", content=few)
    assert code(answer) == (422, "bad_value")
    assert len(answer.content) < 500
    for body in (b"[" * 4000, b"\xff" * 4000, b"{" * 4000):
        assert served.post(f"{API}/session", content=body).status_code in (400, 422)


def test_vectors_have_a_limit(client):
    served, limit = client(), vector_bytes(DIM)
    served.headers["content-type"] = "application/json"
    whole = b'{"vector": [' + b",".join([b"-0.12345678901234567e-10"] * DIM) + b"]}"
    assert len(whole) < limit
    assert served.post(f"{API}/search/vector", content=whole).status_code == 200
    assert code(served.post(f"{API}/search/vector", content=whole.ljust(limit + 1))) == (413, "too_large")
    answer = served.post(f"{API}/search/vector", json={"vector": ["x"] * DIM})
    assert answer.json()["error"]["message"].count("vector.") == 1  # the first wrong number, not all


def test_large_uploads_are_refused_by_their_length_and_by_their_bytes(client):
    served = client(limits=Limits(upload_bytes=20_000))
    small, large = encoded(picture(3)), encoded(picture(3)) + bytes(30_000)
    assert served.post(f"{API}/search", files={"image": small}).status_code == 200
    answer = served.post(f"{API}/search", files={"image": large})
    assert code(answer) == (413, "too_large")
    assert "at most 19.53 KiB" in answer.json()["error"]["message"]

    def pieces():
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield bytes(1000)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert code(served.post(f"{API}/search", content=pieces(), headers=headers)) == (413, "too_large")
    json_body = b'{"vector": [' + b"0," * 20_000 + b"0]}"
    assert code(served.post(f"{API}/search/vector", content=json_body)) == (413, "too_large")


def test_large_pictures_are_refused_by_their_header(client):
    served = client(limits=Limits(pixels=1000))
    assert served.post(f"{API}/search", files={"image": encoded(picture(3, side=30))}).status_code == 200
    answer = served.post(f"{API}/search", files={"image": encoded(picture(3, side=40))})
    assert code(answer) == (422, "bad_image")
    assert "40 × 40 pixels; at most 1,000" in answer.json()["error"]["message"]


def test_slow_decoding_is_given_up(client):
    served = client(limits=Limits(seconds=1, pixels=100_000_000))
    answer = served.post(f"{API}/search", files={"image": many_scans(9500, 50)})
    assert code(answer) == (422, "bad_image")
    assert "more than 1 seconds" in answer.json()["error"]["message"]
    assert served.post(f"{API}/search", files={"image": encoded(picture(3))}).status_code == 200


def test_slow_senders_are_given_up(site):
    import socket
    from urllib.parse import urlsplit

    place = urlsplit(site(FakeIndex(4), limits=Limits(seconds=0.4)))
    with socket.create_connection((place.hostname, place.port), timeout=10) as connection:
        head = f"POST {API}/search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        connection.sendall((head + "Content-Length: 1000\r\n\r\n--x").encode())
        answer = connection.makefile("rb").read()  # all of it: the server closes
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.4 seconds" in answer


def test_unfinished_uploads_hold_few_bytes(site):
    """Uploads stop before their end; what they hold together is bounded, and free again when they are gone."""
    import socket
    from urllib.parse import urlsplit

    size, most = 2 * 2**20, 4
    address = site(FakeIndex(4), limits=Limits(upload_bytes=size, uploads=most, seconds=60))
    place, part = urlsplit(address), b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    head = f"POST {API}/search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    image = {"image": encoded(picture(3, side=100), compress_level=0)}

    def held():
        """Bytes of temporary files, which have no name."""
        total = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                facts = file.stat()
                total += facts.st_size if stat.S_ISREG(facts.st_mode) and not facts.st_nlink else 0
        return total

    with ExitStack() as stack:
        answers, most_held, before = [], 0, held()
        for _ in range(20):
            upload = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=20))
            with suppress(ConnectionError):  # refused before it has sent everything
                upload.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + part + bytes(size - 1000))
            answers.append(httpx.post(f"{address}{API}/search", files=image))
            most_held = max(most_held, held() - before)
        assert {(answer.status_code, answer.headers.get("retry-after")) for answer in answers} == {
            (200, None),
            (503, "1"),
        }
        assert 0 < most_held <= most * size
        assert httpx.post(f"{address}{API}/search/id/1").status_code == 200
    wait_for(lambda: httpx.post(f"{address}{API}/search", files=image).status_code == 200, 20)
    wait_for(lambda: held() <= before, 20)


def test_no_request_reaches_a_file(client, monkeypatch):
    served = client()
    opened = []
    import builtins
    import io

    original = builtins.open
    monkeypatch.setattr(builtins, "open", lambda file, *a, **k: opened.append(str(file)) or original(file, *a, **k))
    monkeypatch.setattr(io, "open", lambda file, *a, **k: opened.append(str(file)) or original(file, *a, **k))
    for path in (
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page//etc/passwd",
        "/page/%2e%2e/app.py",
        "//etc/passwd",
        "/page/app.js%00",
    ):
        answer = served.get(path)
        assert answer.status_code == 404, path
    served.post(f"{API}/items", files={"image": ("../../../tmp/x", encoded(picture(3)))}, data={"name": "/etc/passwd"})
    assert not opened


def test_the_page_asks_nobody_else():
    for path in (Path(serve.__file__).parent / "page").iterdir():
        text = path.read_text(encoding="utf-8")
        for word in ("https://", "//cdn", "eval(", "innerHTML", "insertAdjacentHTML", "document.write"):
            assert word not in text, (path, word)
        assert text.count("http://") == text.count("http://www.w3.org/")
        assert " style=" not in text, path
        assert " onclick=" not in text, path


def test_files_of_the_page_are_not_sent_twice(client):
    served = client()
    for path in ("/", "/page/app.js"):
        answer = served.get(path)
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
        assert served.head(path).headers["etag"] == answer.headers["etag"]
        assert served.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
