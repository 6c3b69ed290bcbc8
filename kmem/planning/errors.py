"""What a planner says when it cannot keep a budget."""


class InfeasibleBudget(ValueError):
    """No schedule is known that fits.

    Attributes:
        budget_bytes: The budget that was asked for.
        smallest_bytes: The smallest peak that is known to be possible.
        lower_bound_bytes: No schedule has a smaller peak; between the two,
            nobody knows.
    """

    def __init__(
        self, budget_bytes: int, smallest_bytes: int, lower_bound_bytes: int
    ):
        super().__init__(
            "`budget_bytes` must be a peak that some schedule keeps. The "
            f"smallest known is {smallest_bytes}; none is below "
            f"{lower_bound_bytes}. Received: budget_bytes={budget_bytes}"
        )
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.lower_bound_bytes = lower_bound_bytes
