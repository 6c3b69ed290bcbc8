"""What a planner says when nothing can be done."""


class InfeasibleBudget(ValueError):
    """No plan that the solver can make fits in the budget.

    Attributes:
        budget_bytes: What was asked for.
        smallest_bytes: The smallest budget that would do.
    """

    def __init__(self, budget_bytes: int, smallest_bytes: int):
        super().__init__(
            f"`budget` must be at least {smallest_bytes} bytes, the smallest "
            f"peak of any plan found. Received: budget={budget_bytes}"
        )
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
