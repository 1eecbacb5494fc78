"""Pages in a browser: a run as it goes (``fald watch``), and settings to play with (``fald explore``)."""
