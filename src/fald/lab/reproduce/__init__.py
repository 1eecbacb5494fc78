"""The experiments of the FA-LD paper, panel by panel, and two that go beyond it."""
