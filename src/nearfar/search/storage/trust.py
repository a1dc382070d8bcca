"""Milvus servers that indexes may use on this machine.

The address of a server is stored in the index folder. A folder from elsewhere could name any server, and would be sent
the user's token. So an address is used only if the user chose it for this index on this machine, which is recorded in
a file among the user's settings, or if the user says so now.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

from nearfar.search.storage.files import BadIndex, index_exists
from nearfar.utils.atomic import write_json
from nearfar.utils.system import config_folder

FILE = "milvus.json"
ADDRESS = "NEARFAR_MILVUS"  # an environment variable: the server of all indexes that use one


def server_of(backend: str) -> str:
    """Return the address of the Milvus server that the name of a backend contains; empty for none."""
    kind, _, address = backend.partition(":")
    return address if kind == "milvus" else ""


def checked(backend: str, folder: Path, identity: str, *, trust: bool) -> str:
    """Return the name of a backend that may be opened."""
    address = server_of(backend)
    if not address:
        return backend
    given = os.environ.get(ADDRESS)
    if not (given or trust or is_trusted(identity, address)):
        raise BadIndex(
            f"{folder} uses the Milvus server {address}, which was not chosen on this machine. If you trust it with "
            f"your token and these vectors, use --trust (trust=True in Python), or set {ADDRESS} to the address of "
            "your own server"
        )
    if identity and not is_copy(folder, identity):
        remember(folder, identity, given or address)
    return f"milvus:{given or address}"


def is_trusted(identity: str, address: str) -> bool:
    """Return whether the user chose a server for an index on this machine."""
    return bool(_read().get(identity, {}).get("address") == address)


def remember(folder: Path, identity: str, address: str) -> None:
    """Record that an index may use a server."""
    entry = {"address": address, "folder": str(folder.resolve())}
    if _read().get(identity) == entry:
        return
    place = config_folder()
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / f".{FILE}.lock"):
        write_json(place / FILE, {**_read(), identity: entry})


def is_copy(folder: Path, identity: str) -> bool:
    """Return whether a folder is a copy of an index that still exists on this machine."""
    known = _read().get(identity, {}).get("folder")
    return known is not None and Path(known) != folder.resolve() and index_exists(Path(known))


def _read() -> dict[str, Any]:
    file = config_folder() / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {key: entry for key, entry in found.items() if isinstance(entry, dict)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise BadIndex(f"{file} cannot be read ({error}); remove it, and open indexes with --trust once") from error
