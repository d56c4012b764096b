"""What is dropped in forward and rebuilt in backward. README.md gives the reading order."""
