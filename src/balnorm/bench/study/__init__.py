"""Studies: which runs there are, how they are trained, and their results."""
