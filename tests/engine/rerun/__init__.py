"""What any code that runs twice must find unchanged."""
