"""The papers' figures and tables, one script for each; see README.md beside this file."""
