"""Replicas whose parameters jump away from the anchor, in a plain and in a sharded training.

The same object disturbs both: plain/train.py calls spoil(), and a distributed run takes the object
as a tamper (ranks.py), which calls __call__ on every rank before the training begins.
"""


class Sick:
    """After each inner step in `steps` (counted from 0) the distance of some replicas to the anchor
    is `factor` (NaN, inf, 100) times as large; one_element: only that of the last element."""

    def __init__(self, factor, replicas, *steps, one_element=False):
        self.factor = factor
        self.replicas = replicas
        self.steps = steps
        self.one_element = one_element

    def spoil(self, x, anchor):
        if self.one_element:
            x = x[-1:]
            anchor = anchor[-1:]
        # x <- a + factor (x - a)
        x.copy_(anchor + self.factor * (x - anchor))

    def __call__(self, method, model, mesh):
        after_step = method.after_step

        def spoil_and_end_step(*args):
            if method.steps in self.steps and mesh.replica in self.replicas:
                self.spoil_shard(method, model, mesh)
            return after_step(*args)

        method.after_step = spoil_and_end_step

    def spoil_shard(self, method, model, mesh):
        layers = list(zip(model.used_views(model.master), model.used_views(method.anchor)))
        if self.one_element:
            layout = model.layouts[-1]
            owner = (layout.used - 1) // layout.shard_size  # of the last element, padding aside
            if mesh.shard_index != owner:
                return
            layers = layers[-1:]
        for x, anchor in layers:
            self.spoil(x, anchor)
