"""One example per key: a small function that raises the error, or makes the warning come."""
