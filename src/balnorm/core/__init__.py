"""How a balanced layer computes: internal, and free to change. :mod:`balnorm.functional` is the public door.

From the bottom up: :mod:`~balnorm.core.torch_private` (every private interface of torch that we touch), ``options``,
``geometry`` (how a kernel meets its input), ``mass`` (the statistic of the input), ``balance`` (the method as plain
differentiable operations), ``matrix`` and ``plan`` (what the closed form works on), its two backends
``torch_backend`` and ``native`` (with ``kernels.c``), ``closed_form`` (the method as one autograd function), ``conv``
(the balanced layer as a function of tensors).
"""
