"""Networks as the tests of ``networks`` want them: settings and small input for each name, and what is published."""

from functools import lru_cache
from itertools import pairwise

import torch
from torch import nn

from nearfar import networks
from nearfar.networks.backbones.base import by_level

IN_DIM = 20
VECTORS = ("linear", "mlp")

# Parameters without the classifier, and SHA-256 (its beginning) over the sorted lines "key [shape]" of the state dict,
# both taken from the published files or, for torchvision's, from its models.
PUBLISHED = {
    "bn_inception": (11_295_240 - 1_025_000, "5ff6514c9433fd77"),
    "efficientnet_lite0": (4_652_008 - 1_281_000, "479a43b9ba402d36"),
    "efficientnet_lite1": (5_416_680 - 1_281_000, "27925679759213c1"),
    "efficientnet_lite2": (6_092_072 - 1_281_000, "23a509fca2b2169b"),
    "googlenet": (6_624_904 - 1_025_000, "0b23b4713417daa6"),
    "mobilenet_v2": (3_504_872 - 1_281_000, "475fe6242d149ee7"),
    "resnet18": (11_689_512 - 513_000, "05d62c7320b26c54"),
    "resnet50": (25_557_032 - 2_049_000, "569b8747885996c6"),
}


# What each level's map says to a random question (see ``probe``), on record from when ``test_parity`` found the same
# maps in torchvision, timm and the port of BN-Inception.
PROBES = {
    "bn_inception": (0.2228, 0.3740, -0.2805),
    "efficientnet_lite0": (-0.7068, 0.1291, 0.4162),
    "efficientnet_lite1": (-0.2933, 0.1254, 0.5326),
    "efficientnet_lite2": (-0.0421, 0.6552, -0.7796),
    "googlenet": (1.6416, -0.3239, -0.2067),
    "mobilenet_v2": (0.4274, 0.5095, 0.2431),
    "resnet18": (0.2102, -0.2333, 0.2977),
    "resnet50": (0.5775, 0.1349, -0.0172),
}


def settings(name):
    return {"in_dim": IN_DIM} if name in VECTORS else {}


@lru_cache
def shape_only(name):
    """A network of zeros in eval mode, made in no time, for keys and shapes. Leave it as it is."""
    with torch.device("meta"):
        backbone = networks.create_backbone(name, **settings(name)).eval()
    backbone.to_empty(device="cpu")
    for value in backbone.state_dict().values():
        value.zero_()
    return backbone


def batch(backbone, count=2, seed=0, size=(64, 64)):
    """Input a backbone can read, as small as it may be."""
    generator = torch.Generator().manual_seed(seed)
    if backbone.key in VECTORS:
        return torch.randn(count, IN_DIM, generator=generator)
    size = (28, 28) if backbone.key == "small_cnn" else size
    return torch.randn(count, backbone.in_channels, *size, generator=generator)


@torch.no_grad()
def randomise(model):
    """Other weights and statistics than a new network has, such that no map dies out."""
    generator = torch.Generator().manual_seed(0)

    def uniform(values, low, high):
        values.uniform_(low, high, generator=generator)

    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            bound = (6 / layer.weight[0].numel()) ** 0.5
            uniform(layer.weight, -bound, bound)
            if layer.bias is not None:
                uniform(layer.bias, -0.5, 0.5)
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            uniform(layer.weight, 0.3, 0.9)
            uniform(layer.bias, -0.5, 0.5)
            uniform(layer.running_mean, -0.5, 0.5)
            uniform(layer.running_var, 0.5, 1.5)


@torch.no_grad()
def probe(backbone):
    """One number for each level that any change of a map would change: its product with random numbers."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for level_map in backbone.maps(4 * torch.rand(1, 3, 75, 97, generator=generator) - 2).values():
        question = 2 * torch.rand(level_map.shape, generator=generator) - 1
        found.append((level_map * question).sum().item() / level_map.norm().item())
    return tuple(found)


class Tiny(networks.Backbone):
    """A backbone with all there is to a backbone, in next to no time."""

    key = "tiny"
    channels = by_level(4, 5, 6)

    def __init__(self):
        super().__init__()
        widths = (3, *self.channels.values())
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Dropout(0.5))
            for a, b in pairwise(widths)
        )

    def maps(self, x):
        found = {}
        for level, stage in zip(self.channels, self.stages, strict=True):
            x = found[level] = stage(x)
        return found


def tiny(seed=0, **embedder_settings):
    """A small embedder with batch norms and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return networks.Embedder(Tiny(), **{"dim": 7, **embedder_settings})


def pictures(count=3, seed=0):
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
