"""One algorithm a module; each gives a schedule or segments."""
