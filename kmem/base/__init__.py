"""What everything else stands on: sizes, checks, files, the native library."""
