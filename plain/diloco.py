"""DiLoCo (arXiv 2311.08105): tau inner steps, then an outer step with the mean pseudo-gradient.

    x_i    the parameters of replica i, a whole vector; there are M replicas
    a      the anchor: the parameters after the last sync, equal in all replicas
    d_i    the pseudo-gradient a - x_i

What is called here is in plain/method.py, and the loop of inner steps is in plain/train.py.
Sharded twin: diloco.py.
"""

from plain.method import Method, mean, norms_of

ALL = slice(None)


class DiLoCo(Method):
    def sync(self):
        # d_i = a - x_i, a list of M vectors
        d = self.d()
        # with d = 1/M sum_i d_i:  b <- mu b + d;  a <- a - lr (d + mu b)
        self.nesterov(ALL, mean(d))
        # x_i <- a
        self.set_all(self.a)
        return {"pseudo_grad_norm": norms_of(d)}
