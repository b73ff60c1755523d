"""A page to look at published versions with: their labels side by side, and why a label is there."""
