"""The `kmem` command: a module for each kind of its subcommands."""
