"""A study: its file, its run, its folder, and those that come with the package."""
