"""DiLoCo (arXiv 2311.08105): tau inner steps, then an outer step with the mean pseudo-gradient.

Sharded twin: diloco.py.
"""

from plain.method import Method, mean, norms_of

ALL = slice(None)


class DiLoCo(Method):
    def sync(self):
        # d = 1/M sum_i (a - x_i)
        d = self.d()
        self.nesterov(ALL, mean(d))
        # x_i <- a
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d)}
