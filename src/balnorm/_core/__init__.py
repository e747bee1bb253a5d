"""How a balanced layer computes. Internal as a whole; :mod:`balnorm.functional` is its public interface.

Read ``method`` first, then ``backends/torch`` and ``function``.
"""
