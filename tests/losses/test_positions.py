"""Where anchors stand in a gallery is believed only if it can be."""

import pytest
import torch
from checks import assert_same, make_gallery, run

import nearfar as nf


def test_positions_outside_the_gallery():
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    for wrong in (-2, len(gallery), 1000):
        positions[0] = wrong
        with pytest.raises(ValueError, match=rf"positions range from .*{wrong}.*; allowed are 0 to {len(gallery) - 1}"):
            nf.losses.Raw()(embeddings, labels, gallery, gallery_labels, positions=positions)


def test_a_position_where_another_label_stands():
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    positions[0] = int((gallery_labels != labels[0]).nonzero()[0])
    words = rf"has {positions[0]} for anchor 0 of label {labels[0]}, but gallery_labels\[{positions[0]}\] is"
    with pytest.raises(ValueError, match=words):
        nf.losses.Raw().pair_weights(embeddings, labels, gallery, gallery_labels, positions=positions)


@pytest.mark.parametrize("key", ["raw", "lifted_structure", "angular"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.int32, torch.uint64])
def test_positions_of_any_integer_type(key, dtype):
    embeddings, labels, *_ = make_gallery()
    loss, here = nf.losses.create(key), torch.arange(len(labels))
    expected = run(loss, embeddings, labels, embeddings, labels, here)
    assert_same(run(loss, embeddings, labels, embeddings, labels, here.to(dtype)), expected, tolerance=0.0)
