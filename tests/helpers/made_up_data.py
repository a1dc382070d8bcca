"""Small datasets of made-up images in the layouts of the published ones: 20 training and 4 test classes."""

import io

import numpy as np
from PIL import Image
from trees_on_disk import write, write_idx

TRAINED, TESTED, EACH = 20, 4, 4
SIDES = 36, 44  # height and width of an image


def _images():
    """Class, from 0, number within the class, and file of each image: noise around the color of the class."""
    rng = np.random.default_rng(0)
    for label in range(TRAINED + TESTED):
        color = rng.integers(60, 196, 3)
        for number in range(EACH):
            pixels = (color + rng.normal(0, 30, (*SIDES, 3))).clip(0, 255).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            yield label, number, file.getvalue()


def _cub(root):
    """The official archive, with bounding boxes; test classes are those after number 100."""
    images, labels, split, boxes = [], [], [], []
    for at, (label, number, data) in enumerate(_images(), 1):
        species = label + 1 if label < TRAINED else 101 + label - TRAINED
        path = f"{species:03d}.Bird_{species}/{number}.png"
        write(root, {f"images/{path}": data})
        images.append(f"{at} {path}")
        labels.append(f"{at} {species}")
        split.append(f"{at} {number % 2}")
        boxes.append(f"{at} 8.0 4.0 30.0 24.0")
    lists = {"images": images, "image_class_labels": labels, "train_test_split": split, "bounding_boxes": boxes}
    write(root, {f"{name}.txt": "\n".join(lines) + "\n" for name, lines in lists.items()})


def _cars196(root):
    """Class folders below train and test, with numbered images."""
    for at, (label, _, data) in enumerate(_images(), 1):
        write(root, {f"{'train' if label < TRAINED else 'test'}/Car {label:02d}/{at:06d}.png": data})


def _sop(root):
    lists = {"Ebay_train.txt": [], "Ebay_test.txt": []}
    for at, (label, number, data) in enumerate(_images(), 1):
        path = f"chair_final/{label}_{number}.JPG"
        write(root, {path: data})
        lists["Ebay_train.txt" if label < TRAINED else "Ebay_test.txt"].append(f"{at} {label + 1} 1 {path}")
    head = "image_id class_id super_class_id path"
    write(root, {name: "\n".join([head, *lines]) + "\n" for name, lines in lists.items()})


def _inshop(root):
    rows = []
    for label, number, data in _images():
        path = f"img/MEN/Pants/id_{label:08d}/{number:02d}_1_front.jpg"
        part = "train" if label < TRAINED else "query" if number % 2 else "gallery"
        write(root, {path: data})
        rows.append(f"{path} id_{label:08d} {part}")
    write(root, {"list_eval_partition.txt": f"{len(rows)}\nimage_name item_id evaluation_status\n" + "\n".join(rows)})


def _mnist(root):
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 60), ("t10k", 40)):
        write_idx(root / f"{prefix}-images-idx3-ubyte", rng.integers(256, size=(count, 28, 28)))
        write_idx(root / f"{prefix}-labels-idx1-ubyte", np.arange(count) % 10)


LAYOUTS = {"cub": _cub, "folder": _cars196, "cars196": _cars196, "sop": _sop, "inshop": _inshop, "mnist": _mnist}


def make(name, folder):
    """The dataset in a folder of its own, made once; None for one that needs no files."""
    if name not in LAYOUTS:
        return None
    root = folder / name
    if not root.exists():
        LAYOUTS[name](root)
    return root
