"""A process of its own for CP-SAT: `cpsat.py` starts it and talks to it.

OR-tools and TensorFlow bring different builds of the same libraries; in one
process the two can crash it. So this file is run as a script, not as a part
of kmem, which would import TensorFlow: it imports OR-tools alone. Each line of
its input is a Boolean program as JSON, each line of its output an answer.
"""

import json
import sys
import types


def main() -> None:
    # The folder of a script is on the path first: its modules must not be
    # taken for others of the same name.
    del sys.path[0]
    cp_model = import_quickly()
    for line in sys.stdin:
        answer = solve(cp_model, json.loads(line))
        print(json.dumps(answer), flush=True)


def import_quickly() -> types.ModuleType:
    """Imports OR-tools without pandas if it can be done.

    Pandas takes longer to import than all the rest. OR-tools names it in the
    types of functions that make tables of variables; nothing here has any.
    """
    stand_in = types.ModuleType("pandas")
    names = "Index", "Series"
    vars(stand_in).update({name: type(name, (), {}) for name in names})
    sys.modules["pandas"] = stand_in
    try:
        from ortools.sat.python import cp_model
    except Exception:
        # Another version of OR-tools, which wants more of it.
        del sys.modules["pandas"]
        from ortools.sat.python import cp_model
    return cp_model


def solve(cp_model, program: dict) -> dict:
    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in program["costs"]]
    for chosen, factors, bound in program["constraints"]:
        total = cp_model.LinearExpr.weighted_sum(
            [variables[i] for i in chosen], factors
        )
        model.add(total <= bound)
    for variable, hint in zip(variables, program["hints"], strict=True):
        if hint is not None:
            model.add_hint(variable, hint)
    model.minimize(
        cp_model.LinearExpr.weighted_sum(variables, program["costs"])
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = program["seconds_limit"]
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = program["seed"]
    for name, value in program["parameters"].items():
        setattr(solver.parameters, name, value)
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "values": [int(solver.value(v)) for v in variables] if found else None,
        "bound": solver.best_objective_bound,
        "is_optimal": status == cp_model.OPTIMAL,
        "is_infeasible": status == cp_model.INFEASIBLE,
    }


if __name__ == "__main__":
    main()
