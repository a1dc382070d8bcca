"""Training: from a recipe to a trained model and its metrics.

>>> from nearfar import training
>>> recipe = training.load_recipe({
...     "sampler": {"classes": 5, "per_class": 8},
...     "network": {"name": "small_cnn", "dim": 16},
...     "augmentation": {"flip": False},
...     "loss": {"name": "proxy_anchor"},
...     "optimizer": {"lr": 1e-3},
...     "training": {"epochs": 5},
... }, overrides=["loss.alpha=16"])
>>> recipe.loss.settings
{'alpha': 16}
"""

from nearfar.training.evaluation.evaluate import calibrate, load_threshold
from nearfar.training.recipe.files import RecipeError
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import Recipe
from nearfar.training.trainer import open_model as load
from nearfar.training.trainer import train

__all__ = ["Recipe", "RecipeError", "calibrate", "load", "load_recipe", "load_threshold", "train"]
