"""What each part costs, measured."""
