"""The data reweighting of `multilevel.py` in PyTorch, as problems of Betty.

The net is that of examples/data_reweighting.py, layer by layer. Betty's own
autocast is one for CUDA, without effect on a CPU: the problems here have one
for the CPU in its place, at the same spot.
"""

import itertools
import logging

import torch
from betty.configs import Config
from betty.configs import EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem
from headline_torch_models import NUM_CLASSES
from headline_torch_models import Bottleneck
from torch import nn
from torch.nn.functional import cross_entropy


def resnet(blocks, width):
    layers = [*_convolution(3, width, 3), nn.ReLU(inplace=True)]
    num_inputs = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(
                Bottleneck(num_inputs, width * 2**stage, stride, _convolution)
            )
            num_inputs = 4 * width * 2**stage
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(num_inputs, NUM_CLASSES),
    )


def meta_weight_net():
    return nn.Sequential(
        nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1), nn.Sigmoid()
    )


def _convolution(num_inputs, num_outputs, size, stride=1):
    """A convolution and its group norm, with the constant of Keras."""
    return (
        nn.Conv2d(num_inputs, num_outputs, size, stride, size // 2, bias=False),
        nn.GroupNorm(8, num_outputs, eps=1e-3),
    )


class Problem(ImplicitProblem):
    """A problem that is given its batches one after the other, again and
    again."""

    batches, in_16_bits = (), False

    def get_batch(self):
        return next(self.batches)

    def training_step_exec(self, batch):
        if not self.in_16_bits:
            return super().training_step_exec(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.training_step(batch)


class Classifier(Problem):
    """Lower level: what the classifier minimises."""

    def training_step(self, batch):
        x, y = batch
        losses = cross_entropy(self.module(x), y, reduction="none")
        weights = self.reweight(losses.detach()[:, None])[:, 0]
        return (weights * losses).mean()


class Reweight(Problem):
    """Upper level: what good weights achieve."""

    def training_step(self, batch):
        x, y = batch
        return cross_entropy(self.classifier(x), y)


def problems(settings, batches, num_parts=1, in_16_bits=False, **config):
    """The two problems and their engine.

    Args:
        settings: Blocks and width of the net.
        batches: A pair of tensors for each problem's name.
        num_parts: Betty's `gradient_accumulation`, of batches in parts.
        in_16_bits: Whether losses are computed under autocast.
        **config: How Betty differentiates through the lower level.
    """
    torch.manual_seed(0)
    classifier = resnet(settings["blocks"], settings["width"])
    reweight = meta_weight_net()
    optimizers = {
        Classifier: torch.optim.SGD(classifier.parameters(), 0.01, 0.9),
        Reweight: torch.optim.Adam(reweight.parameters(), 1e-5),
    }
    made = []
    for kind, module, options in (
        (Classifier, classifier, config),
        (Reweight, reweight, {}),
    ):
        name = kind.__name__.lower()
        options = Config(gradient_accumulation=num_parts, **options)
        problem = kind(name, options, module=module, optimizer=optimizers[kind])
        parts = zip(*(t.chunk(num_parts) for t in batches[name]), strict=True)
        problem.batches = itertools.cycle(parts)
        problem.in_16_bits = in_16_bits
        made.append(problem)
    lower, upper = made
    logging.disable()
    engine = Engine(
        problems=made,
        config=EngineConfig(strategy="cpu"),
        dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )
    engine.train()
    return made, engine
