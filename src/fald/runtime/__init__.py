"""What every long run needs: checkpoints, a journal, progress, the compiler."""
