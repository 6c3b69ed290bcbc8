"""Has Betty compute what tests/multilevel compares kmem with.

    python benchmarks/betty_golden.py

Betty (Choe et al., ICLR 2023, arXiv:2207.02849) and PyTorch are installed in
an environment of their own, which is deleted: kmem and its tests need
neither. The problem is Betty's data reweighting in small, at random weights:
an MLP, and a Meta-Weight-Net that weights its losses (Shu et al., NeurIPS
2019). Conjugate gradients of the package betty-ml 0.2.1 are right for one
iteration only: each direction is made of the residual before. Later commits,
such as the one that is the default, are right.
"""

import argparse
import os
import pathlib
import subprocess
import sys

from torch_environment import environment

SOURCE = "git+https://github.com/leopard-ai/betty@cb6221f"
OUTPUT = (
    pathlib.Path(__file__)
    .resolve()
    .parents[1]
    .joinpath("tests", "multilevel", "golden", "betty_reweighting.npz")
)
# By the names that they have in kmem.
METHODS = {
    "FiniteDifference": {"type": "darts", "darts_alpha": 0.01},
    "ConjugateGradient": {"type": "cg"},
    "Neumann": {
        "type": "neumann",
        "neumann_iterations": 5,
        "neumann_alpha": 0.5,
    },
}
ROWS, NUM_LOWER_BATCHES, NUM_UPPER_BATCHES = 8, 4, 2
OUTER_STEPS, INNER_STEPS = 20, 2
# Binary fractions, which Keras keeps in 32 bits.
LEARNING_RATE, MOMENTUM, PENALTY = 0.125, 0.5, 0.25


def problem():
    """Weights, with kernels as Keras has them, and batches."""
    import numpy as np

    random = np.random.default_rng(0)
    shapes = {
        "classifier": [(4, 8), (8,), (8, 3), (3,)],
        "reweight": [(1, 5), (5,), (5, 1), (1,)],
    }
    arrays = {
        f"{name}_{number}": 0.5 * random.normal(size=shape)
        for name, sizes in shapes.items()
        for number, shape in enumerate(sizes)
    }
    for name, count in (
        ("lower", NUM_LOWER_BATCHES),
        ("upper", NUM_UPPER_BATCHES),
    ):
        arrays[f"x_{name}"] = random.normal(size=(count, ROWS, 4))
        arrays[f"y_{name}"] = random.integers(0, 3, (count, ROWS))
    return arrays


def levels(arrays, dtype, config):
    """Betty's two problems, and the engine that joins them."""
    import itertools

    import torch
    from betty.configs import Config
    from betty.configs import EngineConfig
    from betty.engine import Engine
    from betty.problems import ImplicitProblem
    from torch import nn
    from torch.nn.functional import cross_entropy

    def cycled(name):
        x = torch.tensor(arrays[f"x_{name}"], dtype=dtype)
        y = torch.tensor(arrays[f"y_{name}"])
        return itertools.cycle(zip(x, y, strict=True))

    class Problem(ImplicitProblem):
        def get_batch(self):
            return next(self.batches)

    class Classifier(Problem):
        batches = cycled("lower")

        def training_step(self, batch):
            x, y = batch
            losses = cross_entropy(self.module(x), y, reduction="none")
            weights = self.reweight(losses.detach()[:, None])[:, 0]
            squares = sum(w.square().sum() for w in self.module.parameters())
            return (weights * losses).mean() + PENALTY * squares

    class Reweight(Problem):
        batches = cycled("upper")

        def training_step(self, batch):
            x, y = batch
            return cross_entropy(self.classifier(x), y)

    def net(name, *last):
        first, second = arrays[f"{name}_0"].shape, arrays[f"{name}_2"].shape
        module = nn.Sequential(
            nn.Linear(*first), nn.Tanh(), nn.Linear(*second), *last
        ).to(dtype)
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(torch.tensor(arrays[f"{name}_{number}"].T))
        return module

    def made(kind, name, config, *last):
        module = net(name, *last)
        optimizer = torch.optim.SGD(
            module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        return kind(name, config, module=module, optimizer=optimizer)

    lower = made(
        Classifier, "classifier", Config(unroll_steps=INNER_STEPS, **config)
    )
    upper = made(Reweight, "reweight", Config(retain_graph=True), nn.Sigmoid())
    engine = Engine(
        problems=[lower, upper],
        config=EngineConfig(
            strategy="cpu", train_iters=OUTER_STEPS * INNER_STEPS
        ),
        dependencies={"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )
    return lower, upper, engine


def flat(tensors):
    """One array, with kernels as Keras has them."""
    import numpy as np

    return np.concatenate([t.detach().numpy().T.ravel() for t in tensors])


def compute(output, source, cg_iterations):
    """Writes what Betty finds, in an environment that has it."""
    import numpy as np
    import torch
    from betty.hypergradient import get_grads

    arrays = problem()
    found = dict(arrays)
    METHODS["ConjugateGradient"]["cg_iterations"] = cg_iterations
    for method, config in METHODS.items():
        for dtype in (torch.float64, torch.float32):
            lower, upper, _ = levels(arrays, dtype, config)
            lower.cur_batch, batch = lower.get_batch(), upper.get_batch()
            loss = upper.training_step(batch)
            name = f"{method}_{str(dtype).removeprefix('torch.')}"
            found[name] = flat(get_grads(loss, upper.paths[0], True, False))
        lower, upper, engine = levels(arrays, torch.float64, config)
        engine.run()
        for level in (lower, upper):
            found[f"{method}_{level.name}"] = flat(level.module.parameters())
    found["cg_iterations"] = cg_iterations
    found["made_with"] = f"{source}, torch {torch.__version__}"
    np.savez_compressed(output, **found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--source",
        default=SOURCE,
        help="what pip installs Betty from, such as a folder with its sources "
        "or `betty-ml==0.2.1`; the commit by default",
    )
    parser.add_argument("--cg-iterations", type=int, default=30)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        compute(arguments.output, arguments.source, arguments.cg_iterations)
        return
    with environment(betty=arguments.source) as python:
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        subprocess.run(
            [python, __file__, "--run", *sys.argv[1:]],
            env=variables,
            check=True,
        )


if __name__ == "__main__":
    main()
