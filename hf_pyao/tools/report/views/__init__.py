"""What each kind of document shows, as texts and tables."""
