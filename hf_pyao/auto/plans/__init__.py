"""Makes, follows, checks and keeps the plans of policy auto."""
