"""The bench: normalisations, networks, data, training, studies, and the command ``balnorm``.

It needs the packages of the extra ``bench``; the library around it never imports it.
"""
