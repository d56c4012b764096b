"""torch's saved-tensor hooks and their stack, and other hooks of torch around a layer call."""
