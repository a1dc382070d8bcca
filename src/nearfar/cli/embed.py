"""nearfar embed"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.options import BatchSize, Device, Download, Engine, Force, Model, NoLabels, RayAddress, Workers
from nearfar.cli.output import print_list, say
from nearfar.utils.folders import remove
from nearfar.utils.formatting import plural
from nearfar.utils.progress import bars


@app.command(name="embed", short_help="Write the embeddings of images or vectors.")
def embed_images(
    model: Model,
    photos: Annotated[
        Path, Argument(metavar="PHOTOS", help="A folder or archive of images, one image, or a file of vectors.")
    ],
    out: Annotated[Path, Option("-o", "--out", metavar="FILE", help="An .npz, .safetensors or .npy file.")] = Path(
        "embeddings.npz"
    ),
    no_labels: NoLabels = False,
    device: Device = "auto",
    batch_size: BatchSize = 64,
    download: Download = False,
    engine: Engine = "local",
    jobs: Workers = None,
    ray_address: RayAddress = None,
    force: Force = False,
) -> None:
    """Write the embeddings, names and classes of images, or of the vectors in a file.

    With --engine ray, workers keep what is done in FILE.parts; the same command resumes an interrupted one.

    Example: nearfar embed runs/birds photos/ -o birds.safetensors && nearfar evaluate birds.safetensors

    Example: nearfar embed runs/wines wines.npz -o embeddings.npz
    """
    from nearfar.search.embedding_files import check_file, embed
    from nearfar.search.engines import part_names
    from nearfar.training.trainer import open_model

    out = check_file(out, [model, photos], force=force)
    parts = out.with_name(f"{out.name}.parts")
    with bars() as watch:
        found = embed(
            model if engine == "ray" else open_model(model, download=download),
            photos,
            labels=None if no_labels else "folder",
            device=device,
            batch_size=batch_size,
            engine=engine,
            jobs=jobs,
            ray_address=ray_address,
            parts=parts,
            watch=watch,
        )
    found.write(out, force=force)
    if engine == "ray":
        remove(parts, part_names(len(found.names) + len(found.skipped), batch_size))
    print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in found.skipped])
    say(f"wrote {out}: {plural(len(found.names), 'embedding')} of {found.vectors.shape[1]:,} dimensions")
