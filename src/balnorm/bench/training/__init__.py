"""Training: from a recipe to a folder with a finished run in it. See :func:`balnorm.bench.training.trainer.train`."""
