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
        self,
        budget_bytes: int,
        smallest_bytes: int,
        lower_bound_bytes: int,
        name: str = "budget_bytes",
        written: str = "",
    ):
        received = f"{name}={written or budget_bytes}"
        if written not in ("", str(budget_bytes)):
            received += f" ({budget_bytes} bytes)"
        super().__init__(
            f"`{name}` must be a peak that some schedule keeps. The smallest "
            f"known is {smallest_bytes}; none is below {lower_bound_bytes}. "
            f"Received: {received}"
        )
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.lower_bound_bytes = lower_bound_bytes
