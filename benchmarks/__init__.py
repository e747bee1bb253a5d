"""What balanced layers cost, side by side with other normalisations. Run with ``make bench``."""
