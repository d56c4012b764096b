"""Studies behind the pages: predictions, counts, comparisons."""
