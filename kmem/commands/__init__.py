"""The `kmem` command: a module for each of its subcommands."""
