"""Training: from a recipe to a folder with a finished run in it. See :func:`balnorm.training.trainer.train`."""
