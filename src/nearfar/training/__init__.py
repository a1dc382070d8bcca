"""From a recipe to a trained model and its honest numbers."""

from nearfar.training.recipe import Recipe
from nearfar.training.recipe_file import RecipeError

__all__ = ["Recipe", "RecipeError"]
