"""Many runs: which there are, how they are run, and what came out."""
