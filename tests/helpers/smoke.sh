#!/usr/bin/env bash
# Uses an installed nearfar as a new user would, outside of the checkout: smoke.sh FOLDER_OF_ITS_ENVIRONMENT
set -euo pipefail
unset PYTHONPATH
export PATH="$(cd "$1/bin" && pwd):$PATH" NEARFAR_CACHE
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
NEARFAR_CACHE=$place/cache
cd "$place"

python - <<'PYTHON'
from pathlib import Path

import nearfar as nf
from PIL import Image
from sklearn.datasets import load_digits

assert Path(nf.__file__).parent.parent.name == "site-packages", nf.__file__
images, labels = load_digits(return_X_y=True)
for number, (image, label) in enumerate(zip(images[:200], labels, strict=False)):
    folder = Path("photos", f"digit {label}")
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image.reshape(8, 8) * 15).astype("uint8")).save(folder / f"{number}.png")
PYTHON

nearfar recipe list >recipes.txt
nearfar recipe list grid >>recipes.txt
nearfar recipe list space >>recipes.txt
grep -q "^folder .*Your own images" recipes.txt
nearfar losses >losses.txt
nearfar train digits/proxy_anchor --quiet --set training.epochs=2 --out runs/digits
nearfar train folder --data photos --quiet --out runs/photos --set network.pretrained=false --set training.epochs=2 \
    --set network.name=small_cnn --set network.pooling=avg --set network.dim=16
nearfar evaluate runs/digits
nearfar report runs/photos
nearfar bench run digits --dry-run >cells.txt
nearfar index build runs/photos photos -o photos.index
nearfar search photos.index photos/*/0.png -k 3
echo "nearfar $(python -c 'import nearfar; print(nearfar.__version__)') works in $1 ($(python --version))"
