"""Server under load, and killed while it writes.

    python benchmarks/serve.py                        # 64 clients for 60 s, then ten kill -9s
    python benchmarks/serve.py --index my.index       # a copy of your own index, searched with its own thumbnails
    python benchmarks/serve.py --seconds 10 --kills 2
    python benchmarks/serve.py --bombs 10 --slow 1000 # while others attack it

`nearfar serve` runs in its own process, on the same machine as the clients. Each client sends one request after the
other over a persistent connection: half of them search by image, the others search by item, fetch a thumbnail, or add
an image and remove it again. The memory of the server is read once a second. The server is killed while four clients
add images; then the index is opened and must contain every add that was acknowledged.

With --bombs, images that are slow to decode are uploaded meanwhile: progressive JPEGs with too many scans or as many as
are allowed, and large PNGs. With --slow, as many connections are held open with half a header; each is opened again a
second after the server has closed it. Memory is that of the server with its worker processes.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Clock, parse, report, show_line
from PIL import Image

from nearfar import networks
from nearfar.search import Index

COLUMNS = ["what", "clients", "seconds", "requests", "requests/s", "p50 ms", "p99 ms", "worst ms", "errors"]
COLUMNS += [
    "bombs",
    "slow connections",
    "MiB at 10 s",
    "MiB at the end",
    "MiB at most",
    "kills",
    "acknowledged",
    "lost",
]
KINDS = {"search by picture": 0.5, "search by item": 0.3, "thumbnail": 0.19, "add and remove": 0.01}
BOUNDARY = b"nearfar-benchmark"
WRITERS = 4
HALF_HEADER = b"GET /api/v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


def synthetic_index(place: Path, count: int, side: int = 64) -> Path:
    """Build an index of synthetic images with a small untrained network."""
    rng = np.random.default_rng(0)
    pictures = place / "pictures"
    for label in range(20):
        base = rng.integers(0, 256, (8, 8, 3))
        (pictures / str(label)).mkdir(parents=True)
        for number in range(count // 20):
            small = np.clip(base + rng.normal(0, 30, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(small).resize((side, side)).save(pictures / str(label) / f"{number}.jpg", quality=90)
    torch.manual_seed(0)
    model = networks.create("small_cnn", dim=64, channels=3, size=32)
    Index.build(model, pictures, out=place / "synthetic.index", device="cpu").close()
    return place / "synthetic.index"


@contextmanager
def server(index: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `nearfar serve` and return the process and its port."""
    command = [sys.executable, "-m", "nearfar", "serve", str(index), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            line = next((line for line in child.stdout if " is served at " in line), None)
            if line is None:
                raise RuntimeError("the server did not start")
            yield child, int(line.split("://127.0.0.1:")[1].split()[0])
        finally:
            child.kill()


class Client:
    """A minimal HTTP client with one persistent connection, to leave the processor to the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        writer.write((head + (f"Content-Type: {kind}\r\n" if kind else "") + "\r\n").encode() + body)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
        content = await reader.readexactly(length)
        if any(line == "connection: close" for line in lines):
            self.close()
        return int(lines[0].split()[1]), content

    async def upload(self, path: str, image: bytes, name: str = "a.jpg") -> tuple[int, bytes]:
        part = f'Content-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'.encode()
        body = b"--" + BOUNDARY + b"\r\n" + part + image + b"\r\n--" + BOUNDARY + b"--\r\n"
        return await self.ask("POST", path, body, f"multipart/form-data; boundary={BOUNDARY.decode()}")

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


def resident(process: int) -> float:
    """Return the resident memory of a process and its children in MiB."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:  # it has just ended
        return 0.0
    return pages * resource.getpagesize() / 2**20 + sum(resident(int(child)) for child in children)


def bombs(count: int) -> list[bytes]:
    """Make images that are small and slow to decode."""

    def encode(image: Image.Image, kind: str, **settings: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **settings)
        return file.getvalue()

    progressive = encode(Image.new("RGB", (7000, 7000), "olive"), "JPEG", progressive=True)
    last = progressive[progressive.rindex(b"\xff\xda") : -2]
    made = [progressive[:-2] + last * scans + progressive[-2:] for scans in (1000, 40)]
    made += [encode(Image.new("RGB", size), "PNG") for size in ((70_000, 700), (7000, 7000))]
    made.append(encode(Image.new("RGBA", (7000, 7000)), "PNG"))
    return [made[number % len(made)] for number in range(count)]


async def attack(port: int, thrown: list[bytes], slow: int, seconds: float) -> tuple[dict[int, int], int]:
    """Upload bombs at regular intervals and hold slow connections open.

    Returns:
        How often each status was received for a bomb, and the number of slow connections that were opened.
    """
    end, opened = time.perf_counter() + seconds, 0
    statuses: dict[int, int] = defaultdict(int)

    async def throw(number: int, bomb: bytes) -> None:
        await asyncio.sleep(seconds * number / len(thrown) / 2)
        client = Client(port)
        statuses[(await client.upload("/api/v1/search", bomb))[0]] += 1
        client.close()

    async def dawdle(number: int) -> None:
        nonlocal opened
        await asyncio.sleep(5 * number / slow)
        while time.perf_counter() < end:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                opened += 1
                writer.write(HALF_HEADER)
                await asyncio.wait_for(reader.read(), end - time.perf_counter())
                writer.close()
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(1)

    await asyncio.gather(*(throw(*each) for each in enumerate(thrown)), *(dawdle(number) for number in range(slow)))
    return statuses, opened


async def load(process: int, port: int, images: list[bytes], options: argparse.Namespace) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    errors: dict[str, int] = defaultdict(int)
    memory: list[float] = []
    thrown = bombs(options.bombs)
    end = time.perf_counter() + options.seconds

    async def one(client: Client, kind: str, rng: np.random.Generator) -> int:
        number = int(rng.integers(len(images)))
        if kind == "search by picture":
            return (await client.upload("/api/v1/search?k=24", images[number]))[0]
        if kind == "search by item":
            return (await client.ask("POST", f"/api/v1/search/id/{number}?k=24"))[0]
        if kind == "thumbnail":
            return (await client.ask("GET", f"/api/v1/items/{number}/thumbnail"))[0]
        status, content = await client.upload("/api/v1/items", images[number])
        return (
            (await client.ask("DELETE", f"/api/v1/items/{json.loads(content)['id']}"))[0] if status == 201 else status
        )

    async def visit(worker: int) -> None:
        rng = np.random.default_rng(worker)
        client = Client(port)
        while time.perf_counter() < end:
            kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
            began = time.perf_counter()
            try:
                status = await one(client, kind, rng)
            except (OSError, asyncio.IncompleteReadError) as error:
                print(f"{kind}: {error!r}", file=sys.stderr)
                client.close()
                status = 0
            times[kind].append(1000 * (time.perf_counter() - began))
            if status != 200:
                errors[kind] += 1
        client.close()

    async def watch() -> None:
        while time.perf_counter() < end:
            memory.append(resident(process))
            await asyncio.sleep(1)

    visits = (visit(worker) for worker in range(options.clients))
    attacked = attack(port, thrown, options.slow, options.seconds)
    (statuses, slow), *_ = await asyncio.gather(attacked, watch(), *visits)
    rows = []
    everything = {"everything": [each for found in times.values() for each in found], **times}
    for what, found in everything.items():
        p50, p99 = np.percentile(found, [50, 99])
        wrong = sum(errors.values()) if what == "everything" else errors[what]
        row = {"what": what, "clients": options.clients, "seconds": options.seconds, "requests": len(found)}
        row |= {"requests/s": len(found) / options.seconds, "p50 ms": float(p50), "p99 ms": float(p99)}
        row |= {"worst ms": max(found), "errors": wrong}
        if what == "everything":
            row |= {"MiB at 10 s": memory[min(10, len(memory) - 1)], "MiB at the end": memory[-1]}
            if options.bombs or options.slow:
                answers = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
                row |= {"bombs": answers, "slow connections": slow}
            row |= {"MiB at most": max(memory), "MiB every 5 s": [round(each, 1) for each in memory[::5]]}
        show_line(row)
        rows.append(row)
    return rows


async def write(port: int, kill: int, images: list[bytes], seconds: float, process: int) -> dict[int, str]:
    """Add images from several clients, kill the server meanwhile, and return the acknowledged ids and names."""
    acknowledged: dict[int, str] = {}

    async def adds(worker: int) -> None:
        client = Client(port)
        for number in range(10**6):
            name = f"{kill}-{worker}-{number}"
            try:
                status, content = await client.upload("/api/v1/items", images[number % len(images)], name)
            except (OSError, asyncio.IncompleteReadError):
                return
            if status == 201:
                acknowledged[json.loads(content)["id"]] = name

    async def kill_later() -> None:
        await asyncio.sleep(seconds)
        os.kill(process, signal.SIGKILL)

    await asyncio.gather(kill_later(), *(adds(worker) for worker in range(WRITERS)))
    return acknowledged


def kills(index: Path, images: list[bytes], count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    acknowledged: dict[int, str] = {}
    for kill in range(count):
        with server(index) as (child, port):
            acknowledged |= asyncio.run(write(port, kill, images, float(rng.uniform(0.5, 2.0)), child.pid))
        print(f"kill {kill + 1}: {len(acknowledged)} adds acknowledged", file=sys.stderr)
    with Index.open(index, device="cpu") as opened:
        kept = {item.id: item.name for item in opened.items}
        lost = [id for id, name in acknowledged.items() if kept.get(id) != name or not opened.thumbnail(id)]
    return {
        "what": "kill -9 during adds",
        "clients": WRITERS,
        "kills": count,
        "acknowledged": len(acknowledged),
        "lost": len(lost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--index", type=Path, help="an index folder, which is copied; by default a synthetic index is built"
    )
    parser.add_argument("--pictures", type=int, default=5000, help="number of synthetic images")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--bombs", type=int, default=0, help="number of images that are slow to decode")
    parser.add_argument("--slow", type=int, default=0, help="number of connections with half a header")
    options = parse(parser, COLUMNS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * options.slow + 1024)), hard))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        index = place / "copy.index"
        shutil.copytree(options.index or synthetic_index(place, options.pictures), index)
        with Index.open(index, read_only=True, device="cpu") as opened:
            images = [thumbnail_of(opened.thumbnail(item.id)) for item in opened.items[:1000]]
        with server(index) as (child, port):
            rows = asyncio.run(load(child.pid, port, images, options))
        rows.append(kills(index, images, options.kills))
        show_line(rows[-1])
    report(rows, COLUMNS, Clock("cpu"), options.out)
    if rows[0]["errors"] or rows[-1]["lost"]:
        sys.exit("there were errors, or acknowledged adds were lost")


def thumbnail_of(data: bytes) -> bytes:
    """Return a JPEG of 160 pixels, as a client would send it."""
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").resize((160, 160)).save(file, "JPEG", quality=85)
    return file.getvalue()


if __name__ == "__main__":
    main()
