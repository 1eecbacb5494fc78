"""What everything rests on: errors, types, keys of random numbers, files, threads."""
