"""From a recipe to a trained model and its honest numbers.

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

from nearfar.training.recipe import Recipe
from nearfar.training.recipe_file import RecipeError
from nearfar.training.recipe_file import load as load_recipe
from nearfar.training.starting import open_model as load
from nearfar.training.starting import train

__all__ = ["Recipe", "RecipeError", "load", "load_recipe", "train"]
